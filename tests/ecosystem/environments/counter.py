"""An environment of verifiers: a tool that adds to a number of the run, which must end at a target."""

import verifiers.v1 as vf

__all__ = ["CounterTaskset"]


class CounterState(vf.State):
    total: int = 0


class CounterData(vf.TaskData):
    target: int


class CounterToolset(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = "counter"

    @vf.tool
    async def add(self, number: int) -> str:
        """Add a number to the counter, and return what it shows."""
        self.state.total += number
        return f"the counter shows {self.state.total}"


class CounterTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterTask(vf.Task[CounterData, CounterState, CounterTaskConfig]):
    @classmethod
    def toolsets(cls, config: CounterTaskConfig) -> list[vf.Toolset]:
        return [CounterToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def reached(self, trace: vf.Trace) -> float:
        return float(trace.state.total == self.data.target)


class CounterConfig(vf.TasksetConfig):
    task: CounterTaskConfig = CounterTaskConfig()


class CounterTaskset(vf.Taskset[CounterTask, CounterConfig]):
    def load(self) -> list[CounterTask]:
        prompt = "Let the counter show {} in steps of 2."
        return [CounterTask(CounterData(prompt=prompt.format(n), target=n), self.config.task) for n in (2, 4, 6)]


if __name__ == "__main__":  # verifiers starts the tool's server so
    CounterToolset.run()
