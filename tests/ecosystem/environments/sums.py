"""An environment of verifiers: one turn, in which the answer must hold a sum."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumsConfig(vf.TasksetConfig):
    size: int = 8


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=-0.5)
    async def shouts(self, trace: vf.Trace) -> float:
        return float("!" in (trace.last_reply or ""))


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        numbers = range(self.config.size)
        return [SumTask(SumData(prompt=f"What is {n} + 1?", answer=str(n + 1)), self.config.task) for n in numbers]
