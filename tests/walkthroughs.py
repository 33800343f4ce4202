"""Writes docs/internals/walkthroughs.md.

    python -m tests.walkthroughs     # after a function of a walkthrough was renamed, moved, or calls another one

The page lists the functions through which a configuration, a micro-batch and a gradient pass.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.test_floors import ROOT

PAGE = ROOT / "docs" / "internals" / "walkthroughs.md"
INTRODUCTION = """# Walkthroughs

Three walkthroughs of the code, function by function: how a [configuration](#configuration) becomes an engine, how a
[micro-batch](#micro-batch) becomes a loss, and how a [gradient](#gradient) becomes an update. Each step is called by the
one before it, or by the step in the third column. A step in *italics* is not a plain call: its description states how it
is reached. A test compares every step with the code. `python -m tests.walkthroughs` writes this page.
"""


@dataclass(frozen=True)
class Step:
    """A function of a walkthrough.

    Attributes:
        where: `module:function`.
        what: description of the function; empty if an earlier step has described it.
        by: name of its caller, by default the previous step.
        via: short helpers of the caller's module between the caller and this function.
        note: how the function is reached, if the source of the caller does not contain its name.
    """

    where: str
    what: str = ""
    by: str = ""
    via: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """The function with its class."""
        return self.where.partition(":")[2]


@dataclass(frozen=True)
class Walkthrough:
    """The functions that an object passes through, in order."""

    name: str
    title: str
    steps: tuple[Step, ...]

    def calls(self) -> Iterator[tuple[Step, Step]]:
        """Yields every step but the first after its caller."""
        described = {step.where: step for step in self.steps if step.what}
        named = {step.name: step for step in described.values()}
        for before, step in zip(self.steps, self.steps[1:], strict=False):
            if step.by or step.note != "begins":
                yield named[step.by] if step.by else described[before.where], step


CONFIG = Walkthrough(
    "configuration",
    "From the command line to an engine, and on the meta device to a forecast",
    (
        Step("threed.cli.launch:_train", "receives the resolved configuration"),
        Step("threed.trainer:start_engine", "builds process groups, model and engine"),
        Step("threed.distributed.topology:Topology", "creates the axes and their process groups"),
        Step(
            "threed.models.custom:build",
            "creates the layers of the architecture on the meta device",
            by="start_engine",
        ),
        Step(
            "threed.engine.base:Engine",
            "combines model, topology and configuration",
            by="start_engine",
        ),
        Step("threed.engine.base:Engine._build", "builds all parts of the engine"),
        Step("threed.planner.build:draw", "checks that the model is equal on all ranks"),
        Step("threed.planner.blueprint:Pipeline.of", "partitions the model and plans a step"),
        Step(
            "threed.schedules.registry:build",
            "returns the compute actions of a step",
            via=("step_plan",),
        ),
        Step(
            "threed.models.pipeline_layout:partition",
            "assigns layers to stages",
            by="Pipeline.of",
            via=("_divide_by_cost",),
        ),
        Step(
            "threed.models.pipeline_layout:PipelineLayout.of",
            "assigns stages to ranks, as chunks",
            by="Pipeline.of",
        ),
        Step(
            "threed.planner.blueprint:Blueprint.build",
            "lays out the parameters of this rank",
            by="draw",
        ),
        Step(
            "threed.distributed.topology:Topology.prepare",
            "creates groups for blocks, tied weights and links",
            by="Blueprint.build",
        ),
        Step(
            "threed.zero.setup:policy",
            "returns the ZeRO stage, axes, dtypes and storage of slices",
            by="Blueprint.build",
        ),
        Step(
            "threed.zero.layout:build",
            "creates groups, buckets and slices, and allocates them",
            by="Blueprint.build",
        ),
        Step(
            "threed.memory.tiers:InMemory", "stores a slice in memory", via=("_group", "_buckets")
        ),
        Step("threed.zero.gather:Gatherer", "gathers parameters", by="Engine._build"),
        Step(
            "threed.zero.reducer:Reducer",
            "gives each parameter a gradient sink",
            by="Engine._build",
        ),
        Step(
            "threed.zero.optimizer:Optimizer",
            "creates a state per slice",
            by="Engine._build",
            via=("_make_optimizer",),
        ),
        Step(
            "threed.planner.blueprint:Blueprint.stages",
            "returns the chunks of this rank",
            by="Engine._build",
        ),
        Step("threed.pipeline.stage:Stage", "runs the layers of a chunk"),
        Step("threed.pipeline.executor:Executor", "runs plans on the stages", by="Engine._build"),
        Step(
            "threed.planner.forecast:Forecast.of",
            "reads the same configuration before any group is created",
            note="begins",
        ),
        Step(
            "threed.planner.stages:Column",
            "represents all ranks with the same tensor index",
            via=("_of",),
        ),
        Step(
            "threed.distributed.topology:Topology.on_meta", "creates the same axes without groups"
        ),
        Step("threed.models.custom:build", by="Column"),
        Step(
            "threed.planner.stages:Stages",
            "divides the model into stages",
            by="Forecast.of",
            via=("_of",),
        ),
        Step("threed.planner.stages:Column.blueprint", "lays out one rank per stage"),
        Step("threed.planner.blueprint:Blueprint.build"),
        Step(
            "threed.planner.memory_estimate:footprint",
            "computes bytes and traffic from the blueprint",
            by="Stages",
        ),
        Step(
            "threed.planner.reductions:Reductions",
            "measures the memory of gradient reductions",
            via=("Fixed",),
        ),
        Step("threed.zero.reducer:Reducer"),
    ),
)

_EXECUTOR, _STAGE = "threed.pipeline.executor:Executor", "threed.pipeline.stage:Stage"
_LOOP, _ENGINE = "threed.trainer:Loop", "threed.engine.base:Engine"

MICROBATCH = Walkthrough(
    "micro-batch",
    "From the data to the loss",
    (
        Step(f"{_LOOP}._one_step", "requests the batch of the step"),
        Step("threed.data.prefetch:Prefetcher.get", "waits if the prefetch thread is behind"),
        Step(
            f"{_LOOP}._share_of_batch",
            "returns the samples of this data rank",
            note="called ahead by the prefetch thread",
        ),
        Step("threed.data.samples:Samples.batch", "reads tokens and labels from a memory map"),
        Step(
            "threed.training.bad_steps:BadSteps.step",
            "runs the step, and computes a skipped one again",
            by="Loop._one_step",
        ),
        Step(f"{_ENGINE}.step", "runs one optimizer step"),
        Step(
            "threed.pipeline.batches:Batches.micro_batches",
            "moves the batch to the device and splits it",
        ),
        Step(
            "threed.distributed.collectives:sum_of_scalars",
            "counts the valid tokens of all data ranks",
            via=("_weight",),
        ),
        Step(
            "threed.zero.optimizer:Synchronous.run",
            "runs forwards and backwards, without the update",
            by="Engine.step",
        ),
        Step(
            "threed.planner.blueprint:Blueprint.lowered",
            "returns the plan for this number of micro-batches",
            note="passed to the constructor",
        ),
        Step("threed.schedules.lowering:lower", "adds sends, receives and gathers; cached"),
        Step(f"{_EXECUTOR}.run", "runs the actions of this rank in order", by="Synchronous.run"),
        Step(
            f"{_EXECUTOR}._receive",
            "receives the input of a forward",
            note="by the table of handlers",
        ),
        Step(
            "threed.pipeline.transport:Links.receive",
            "receives on the link from the previous stage",
        ),
        Step("threed.distributed.collectives:receive", "starts an asynchronous receive"),
        Step(
            f"{_EXECUTOR}._forward",
            "handles one micro-batch on one chunk",
            by="Executor.run",
            note="by the table of handlers",
        ),
        Step(f"{_STAGE}.forward_by_layer", "runs the layers in order", via=("_forward_by_layer",)),
        Step("threed.zero.gather:Gatherer.ready", "waits for the parameters of a layer"),
        Step(
            "threed.layers.block:Block.forward",
            "adds attention and MLP to the residual",
            by="Stage.forward_by_layer",
            note="called as a module: layer(x, micro)",
        ),
        Step(
            "threed.layers.mlp:MLP.forward",
            "computes up projection, activation, down projection",
            note="called as a module",
        ),
        Step(
            "threed.layers.linear:ColumnLinear.forward",
            "multiplies and adds the bias",
            note="called as a module",
        ),
        Step("threed.layers.linear:Product.product", "multiplies at once or tile by tile"),
        Step("threed.layers.linear:linear", "bypasses autograd for the weight gradient"),
        Step(
            "threed.layers.linear:_Linear.forward",
            "is one node of the autograd graph",
            note="by autograd",
        ),
        Step(
            "threed.distributed.collectives:all_gather",
            "gathers the sequence under sequence parallelism",
        ),
        Step(
            "threed.ops.matmul:linear",
            "computes the matrix product",
            by="_Linear.forward",
            via=("product",),
        ),
        Step(
            "threed.layers.linear:RowLinear.forward",
            "multiplies, then reduces over tensor ranks",
            by="MLP.forward",
            note="called as a module",
        ),
        Step(
            "threed.layers.slicing:Slicing.reduce",
            "reduces the partial products",
            via=("_reduced",),
        ),
        Step("threed.distributed.conjugate:reduce_from", "sums over tensor ranks"),
        Step(
            "threed.layers.loss:LanguageModelHead.forward",
            "returns the weighted sum of the token losses",
            by="Stage.forward_by_layer",
            note="called as a module, on the last stage",
        ),
        Step("threed.layers.loss:_Projection.loss", "computes the loss of this rank's logits"),
        Step(
            "threed.ops.cross_entropy:weighted_loss",
            "combines three numbers per token over tensor ranks",
        ),
        Step(
            f"{_EXECUTOR}._send",
            "sends the output, except on the last stage",
            by="Executor.run",
            note="by the table of handlers",
        ),
        Step("threed.pipeline.transport:Links.send", "sends on the link to the next stage"),
        Step("threed.distributed.collectives:send", "starts an asynchronous send"),
        Step(f"{_ENGINE}._end_step", "ends the step with the loss of this rank", by="Engine.step"),
        Step("threed.zero.optimizer:Synchronous.update", "updates the weights"),
        Step("threed.zero.optimizer:Optimizer.step", "sums loss and gradient norm in one message"),
        Step(
            "threed.distributed.collectives:start_sum_of_scalars",
            "starts the sum over all ranks",
            via=("start_step",),
        ),
        Step(
            "threed.training.step_log:StepLog.after_step",
            "collects metrics, as a callback",
            by="Loop._one_step",
        ),
        Step(
            "threed.zero.step_metrics:StepMetrics.loss",
            "waits for the device when the loss is read",
        ),
    ),
)

_REDUCER = "threed.zero.reducer:Reducer"
_REDUCTIONS = "threed.zero.reductions:Reductions"
_SINK = "threed.zero.sinks:Sink"
_OPTIMIZER = "threed.zero.optimizer:Optimizer"

GRADIENT = Walkthrough(
    "gradient",
    "From the backward of a layer to the parameters of the next step, under ZeRO 0 and 1. ZeRO 2 and 3 reduce after every"
    " micro-batch, from one buffer per bucket (`BucketGradients` instead of `FullGradients`)",
    (
        Step(f"{_ENGINE}.step", "runs one optimizer step"),
        Step("threed.zero.optimizer:Synchronous.run", "runs forwards and backwards"),
        Step(f"{_EXECUTOR}.run", "runs the plan of this rank"),
        Step(
            f"{_EXECUTOR}._backward",
            "handles one micro-batch on one chunk",
            note="by the table of handlers",
        ),
        Step(
            f"{_STAGE}.backward_by_layer",
            "runs the layers in reverse order",
            via=("_backward_by_layer",),
        ),
        Step(
            "threed.layers.linear:_Linear.backward",
            "is the backward of a linear layer",
            note="called by autograd",
        ),
        Step("threed.layers.linear:gradients", "computes dx and dW"),
        Step("threed.layers.linear:weight_gradient", "adds dW to the gradient sink of the weight"),
        Step(
            "threed.distributed.collectives:start_all_reduce",
            "starts the sum of dx over tensor ranks, overlapping with dW",
            by="gradients",
        ),
        Step(
            f"{_SINK}.add_product",
            "adds a contribution to the gradient of a parameter, and counts it",
            by="weight_gradient",
        ),
        Step(
            "threed.zero.reductions:FullGradients.view",
            "returns the view of the gradient in the flat buffer",
            via=("_target",),
        ),
        Step(
            "threed.ops.matmul:add_product_",
            "adds the product into the buffer",
            by="Sink.add_product",
        ),
        Step(
            f"{_REDUCER}.mark_complete",
            "checks whether the next bucket is ready",
            by="Sink.add_product",
            via=("mark_added",),
        ),
        Step(f"{_REDUCER}._launch", "launches the reduction of the next bucket in order"),
        Step(
            f"{_REDUCTIONS}.launch",
            "sums the full gradients of the bucket over ranks; each rank gets its slice",
        ),
        Step(
            "threed.distributed.collectives:start_reduce_scatter", "starts the sum over data ranks"
        ),
        Step(
            f"{_REDUCTIONS}.make_room",
            "limits the number of reductions in flight",
            by="Reducer._launch",
        ),
        Step(f"{_REDUCTIONS}.wait_oldest", "waits for the oldest reduction"),
        Step(f"{_REDUCTIONS}._store", "stores the reduced slice"),
        Step(
            "threed.zero.reductions:squares",
            "adds the squares of the slice to the norm",
            via=("store",),
        ),
        Step(
            "threed.memory.tiers:start_copy",
            "starts the copy to host memory or NVMe",
            by="Reductions.wait_oldest",
        ),
        Step(f"{_ENGINE}._end_step", "ends the step after the last backward", by="Engine.step"),
        Step("threed.zero.optimizer:Synchronous.update", "waits for gradients and updates weights"),
        Step(f"{_REDUCER}.finish", "waits for all remaining reductions"),
        Step(
            f"{_OPTIMIZER}.step",
            "computes norm, clip factor, skip flag and learning rate as tensors",
            by="Synchronous.update",
        ),
        Step(
            "threed.distributed.collectives:start_sum_of_scalars",
            "sums norm and loss over all ranks in one message",
            via=("start_step",),
        ),
        Step(
            f"{_OPTIMIZER}._update",
            "updates bucket by bucket in forward order",
            by="Optimizer.step",
            via=("start_step", "_apply", "_start_update", "_update_all"),
        ),
        Step(
            "threed.ops.adam:Adam.update",
            "updates weights and moments of a slice",
            via=("_apply_rule",),
        ),
        Step(
            "threed.zero.gather:Gatherer.publish",
            "publishes the new values of a bucket",
            by="Optimizer._update",
        ),
        Step(
            "threed.distributed.collectives:start_all_gather",
            "starts the all-gather of the bucket",
            via=("_publish",),
        ),
        Step(
            f"{_STAGE}.forward_by_layer",
            "runs the layers of the next step",
            by="Gatherer.publish",
            note="starts while gathers are in flight",
        ),
        Step("threed.zero.gather:Gatherer.ready", "waits for the buckets of this layer only"),
        Step(
            "threed.distributed.collectives:Pending.wait",
            "returns when the bucket is gathered",
            via=("_wait_for",),
        ),
    ),
)

WALKTHROUGHS = (CONFIG, MICROBATCH, GRADIENT)


def table(walkthrough: Walkthrough) -> Iterator[str]:
    """Yields the lines of a walkthrough: a heading and a table."""
    numbers = {step.where: n for n, step in enumerate(walkthrough.steps, 1) if step.what}
    callers = {id(step): caller for caller, step in walkthrough.calls()}
    title = textwrap.fill(f"{walkthrough.title}.", 120)
    yield f"## {walkthrough.name.capitalize()}\n\n{title}\n"
    yield "| step | function | called by | file | purpose |\n|---|---|---|---|---|"
    for number, step in enumerate(walkthrough.steps, 1):
        caller = callers.get(id(step))
        by = "" if caller is None or numbers[caller.where] == number - 1 else numbers[caller.where]
        file = step.where.partition(":")[0].replace(".", "/")
        file += "/__init__.py" if (ROOT / file).is_dir() else ".py"
        what = step.what or f"as step {numbers[step.where]}"
        note = f" *({step.note})*" if step.note and step.note != "begins" else ""
        yield f"| {number} | `{step.name}` | {by} | `{file}` | {what}{note} |"


def page() -> str:
    """Returns the page."""
    return "\n".join([INTRODUCTION, *("\n".join(table(one)) + "\n" for one in WALKTHROUGHS)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
