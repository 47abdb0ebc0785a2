"""The master of a run: the training loop, whose step is a declared graph that runs on groups of workers.

It mirrors the loop of the example scripts with one rank and the same parts; only the models run elsewhere. A call
starts when its inputs exist and its workers are free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import RunFolder
from arealite.core.batch import Column, RemoteBatch
from arealite.core.graph import DataFlowGraph, ModelFunctionCall
from arealite.core.group import Task
from arealite.core.names import named
from arealite.core.page import Progress, write_page
from arealite.core.records import CallLog, summary
from arealite.core.sources import Episodes, MakeWorkflow, Rows
from arealite.core.worker import Call
from arealite.core.workers import Workers
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer

_PAGE_S = 2.0  # between two versions of the page


class Master:
    """Runs a graph step after step. A config that does not fit the graph is refused before anything starts."""

    def __init__(
        self, config: BaseExperimentConfig, graph: DataFlowGraph, make_workflow: MakeWorkflow | str | None = None
    ) -> None:
        """`make_workflow` may name an agent: a name of `register_agent`, `module:CLASS` or `FILE.py:CLASS`."""
        graph.check(config)
        self.config, self.graph = config, graph
        if isinstance(make_workflow, str):
            make_workflow = named("agent", make_workflow, key="make_workflow")
        self._make_workflow = make_workflow
        self._tasks: dict[str, Task] = {}  # of the step
        self.progress = Progress(graph)

    def run(self) -> None:
        """Train to the end, resuming from the checkpoint of an interrupted run."""
        with ExitStack() as cleanup:  # stops everything, also after an error
            self._train(cleanup)

    def _train(self, cleanup: ExitStack) -> None:
        config = self.config
        tokenizer = load_hf_tokenizer(config.tokenizer_path)
        make_source = Episodes if self.graph.source.role == "rollout" else Rows
        source = make_source(config, self._make_workflow, tokenizer)
        ft_spec = source.ft_spec
        recover = Recover(config.recover, ft_spec)  # locks the run folder

        self.workers = cleanup.enter_context(Workers(config, is_declared=True))
        self.engines = self._make_engines(cleanup, ft_spec)
        actor = self.engines[self.graph.publishes]
        source.start(cleanup, self.workers)
        saver = Saver(config.saver, ft_spec)

        # An interrupted run resumes as if nothing had happened; a new run starts at step 0.
        trained = {call.role: self.engines[call.role] for call in self.graph.train_steps}
        del trained[self.graph.publishes]
        clocks = source.clocks | {"saver": saver}
        start_step = recover.load(actor, source.dataloader, rollout=source.rollout, clocks=clocks, **trained)
        stats = StatsLogger(config.stats_logger, ft_spec, experiment=config, start_step=start_step)
        cleanup.enter_context(stats)
        cleanup.enter_context(recover)  # from here on a run that is asked to stop ends with a checkpoint
        self._log = CallLog(RunFolder(config).calls, start_step=start_step)
        self.progress.step = max(start_step - 1, 0)
        cleanup.enter_context(self._page())

        source.publish(actor, start_step)
        for step in range(start_step, ft_spec.total_train_steps):
            self.progress.step = step
            with stats.timer("eval"):
                stats.add(source.evaluate(actor, step))
            with stats.timer("rollout"):
                batch = source.collect()
            with stats.timer("train"):
                stats.add(self.run_graph(batch))
            with stats.timer("weights"):
                source.publish(actor, step + 1)
            saver.save(actor, step, tokenizer=tokenizer, **trained)
            stats.add(source.metrics())
            stats.add(self._measure())
            stats.commit(step)
            with stats.timer("recover"):
                recover.save(step)

        # The results: the final model, a last evaluation, the report.
        last = ft_spec.total_train_steps - 1
        saver.save(actor, last, tokenizer=tokenizer, force=True, **trained)
        with stats.timer("eval"):
            stats.add(source.evaluate(actor, last + 1, force=True))
        stats.commit(last + 1)
        stats.close()

    def _make_engines(self, cleanup: ExitStack, ft_spec: FinetuneSpec) -> dict[str, Any]:
        """Load every role's model, the published role first: a LoRA reference shares its weights."""
        engines: dict[str, Any] = {}
        for role in sorted(self.graph.engines, key=lambda role: role != self.graph.publishes):
            engine = engines[role] = self.workers.engine(role, self.graph.engines[role], getattr(self.config, role))
            engine.initialize(None, ft_spec, policy=engines[self.graph.publishes] if role == "ref" else None)
            cleanup.callback(engine.destroy)
        return engines

    # A step

    def run_graph(self, batch: RemoteBatch) -> dict[str, float]:
        """Run all calls of the graph on a batch and return their metrics and the workflow's.

        If several calls return the same metric, all but the first get the role as prefix.
        """
        calls = [call for call in self.graph.order() if not call.is_source]
        tasks = self._tasks = dict[str, Task]()
        for call in calls:
            tasks[call.name] = self._submit(call, batch, tasks)
        metrics: dict[str, float] = {}
        for call in calls:
            outcome = self.engines[call.role].wait(tasks[call.name])
            call.outputs_among(outcome.made)  # raises if a declared output is missing
            if isinstance(outcome.value, Mapping):
                own = outcome.value.items()
                metrics |= {f"{call.role}/{key}" if key in metrics else key: value for key, value in own}
        return {**batch.metrics, **metrics}

    def _submit(self, call: ModelFunctionCall, batch: RemoteBatch, tasks: Mapping[str, Task]) -> Task:
        """Queue a call on its workers, and add its pending outputs to the batch."""
        assert call.run is not None, "only a source has no function"
        name = call.run.__name__
        run = name if getattr(self.graph.engines[call.role], name, None) is call.run else call.run
        remote_call = Call(
            call.name,
            call.role,
            run,
            kwargs=call.kwargs,
            batch=batch.select(call.inputs_among(batch.keys())),
            output=call.outputs[0] if len(call.outputs) == 1 else None,
            after=[tasks[name].pieces for name in call.after],
        )
        task = self.engines[call.role].group.submit(remote_call)
        for key in call.outputs:
            plain = key.removesuffix("?")
            batch[plain] = Column(task.pieces, plain, task.values if key.endswith("?") else None)
        return task

    def _measure(self) -> dict[str, float]:
        """Log the finished calls, and return the metrics of the workers in this step."""
        records = self.workers.take_records()
        for record in records:
            self._log.append(record)
        step, named_calls = self.progress.step, self.graph.named
        calls = [record for record in records if record.call in named_calls and record.step == step]
        self.progress.calls, self._tasks = calls, {}
        if not calls:
            return self.workers.metrics()
        last = summary(calls, [group.spec.name for group in self.workers.groups])
        seconds = {f"core/{call.call}_s": call.seconds for call in calls}
        idle = {f"core/idle_{group}": share for group, share in last.idle.items()}
        of_all = {"core/overlap": last.overlap, "core/moved_mib": last.moved_mib}
        return seconds | idle | of_all | self.workers.metrics()

    @contextmanager
    def _page(self) -> Iterator[None]:
        """Rewrite `graph.html` from a thread during a run."""
        progress, is_over = self.progress, threading.Event()
        progress.incidents = self.workers.incidents

        def write() -> None:
            while not progress.is_finished:
                progress.is_finished = is_over.wait(_PAGE_S)
                tasks = [*self._tasks.items()]  # the loop adds tasks concurrently
                progress.states = {name: task.state for name, task in tasks}
                progress.machines = {group.spec: group.machines for group in self.workers.groups}
                write_page(RunFolder(self.config), progress, now=time.time())

        thread = threading.Thread(target=write, name="arealite-page", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
