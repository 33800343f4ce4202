"""Writes docs/images/journey_*.svg: how a configuration, a micro-batch and a gradient pass through the floors.

python -m tests.journeys     # after a function on the way came, went, moved, or calls another one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house import SANS, STYLES, draw_band, wrap, write
from tests.test_floors import FLOORS, ROOT

LEFT, WIDTH, GUTTER, LANE = (
    190,
    172,
    24,
    24,
)  # of the first box; of boxes; between columns, and between boxes
SIZE, LINE, MARGIN = 9.5, 12, 14  # of letters, of lines, and above and below the boxes of a floor
DARK, PAPER = "#1f2937", "#a0522d"


@dataclass(frozen=True)
class Step:
    """A function on the way.

    by: the name of the one that calls it, by default the step before. via: short helpers of the caller's module that
    the call passes through. note: how it is called where the caller's source does not name it, or it is on a higher
    floor; its arrow is dashed. column: where it is drawn, by default below the step before if it can be. paper: nothing
    is in memory on this way.
    A step without `what` is one that was there before: only the arrow is new.
    """

    where: str
    what: str = ""
    by: str = ""
    via: tuple[str, ...] = ()
    note: str = ""
    column: int | None = None
    paper: bool = False

    @property
    def floor(self) -> int:
        """The floor of its module."""
        return FLOORS[".".join(self.where.partition(":")[0].split(".")[:2])]

    @property
    def file(self) -> str:
        """Its module, without the package's name."""
        return self.where.partition(":")[0].removeprefix("threed.")

    @property
    def name(self) -> str:
        """The function, with its class."""
        return self.where.partition(":")[2]


@dataclass(frozen=True)
class Journey:
    """What passes through the house, step by step."""

    name: str
    title: str
    steps: tuple[Step, ...]

    @property
    def picture(self) -> Path:
        """Where it is drawn."""
        return ROOT / "docs" / "images" / f"journey_{self.name}.svg"

    def calls(self) -> Iterator[tuple[Step, Step]]:
        """Every step but the first, after its caller."""
        drawn = {step.where: step for step in self.steps if step.what}
        named = {step.name: step for step in drawn.values()}
        for before, step in zip(self.steps, self.steps[1:], strict=False):
            if step.by or step.note != "begins":
                yield named[step.by] if step.by else drawn[before.where], step


CONFIG = Journey(
    "config",
    "A configuration: from the command line to an engine, and on paper to a forecast",
    (
        Step("threed.cli.launch:_train", "has the resolved configuration"),
        Step("threed.distributed.topology:Topology", "sizes become axes with process groups"),
        Step("threed.interop.loading:build_engine", "the model, then its engine", by="_train"),
        Step("threed.models:build", "the architecture's layers, on the meta device"),
        Step("threed.engine:Engine", "one object from model, topology, configuration",
             by="build_engine", note="as a LayeredEngine"),
        Step("threed.planner.build:draw", "once ranks agree about the model"),
        Step("threed.planner.blueprint:Pipeline.of", "cuts the model, plans a step"),
        Step("threed.schedules:build", "the step's compute actions", via=("step_plan",)),
        Step("threed.models.cut:partition", "the layers of every stage", by="Pipeline.of", via=("_cut_by_cost",)),
        Step("threed.models.cut:Cut.of", "places stages on ranks, as chunks", by="Pipeline.of"),
        Step("threed.planner.blueprint:Blueprint.draw", "lays out this rank", by="draw"),
        Step("threed.distributed.topology:Topology.prepare", "groups for blocks, tied weights, links", by="Blueprint.draw"),
        Step("threed.zero.setup:policy", "stage, axes, dtypes, where slices live", by="Blueprint.draw"),
        Step("threed.zero.layout:build", "groups, buckets, slices, and their memory", by="Blueprint.draw"),
        Step("threed.memory.tiers:InMemory", "the storage of one slice", via=("_group", "_buckets")),
        Step("threed.zero.gather:Gatherer", "makes parameters whole", by="Engine"),
        Step("threed.zero.reducer:Reducer", "a sink for every parameter", by="Engine"),
        Step("threed.zero.optimizer:Optimizer", "a state for every slice", by="Engine", via=("_make_optimizer",)),
        Step("threed.planner.blueprint:Blueprint.stages", "this rank's chunks", by="Engine"),
        Step("threed.pipeline.stage:Stage", "a chunk's layers and the gatherer"),
        Step("threed.pipeline.executor:Executor", "walks plans over the stages", by="Engine"),
        Step("threed.planner.forecast:Forecast.of", "the same configuration, before any group",
             note="begins", column=3, paper=True),
        Step("threed.planner.forecast:_Column", "the ranks of one tensor index", column=3, paper=True),
        Step("threed.distributed.topology:Topology.drawn", "the same axes without groups", column=3, paper=True),
        Step("threed.models:build", by="_Column", paper=True),
        Step("threed.planner.forecast:_Column.blueprint", "one rank of every stage", by="Forecast.of", column=4, paper=True),
        Step("threed.planner.blueprint:Blueprint.draw", paper=True),
        Step("threed.planner.memory_estimate:footprint", "bytes and traffic, read off the blueprint",
             by="Forecast.of", column=5, paper=True),
        Step("threed.zero.reducer:Reducer", via=("_Reductions",), paper=True),
    ),
)  # fmt: skip

_EXECUTOR, _STAGE = "threed.pipeline.executor:Executor", "threed.pipeline.stage:Stage"
_LOOP, _ENGINE = "threed.trainer:Loop", "threed.engine:Engine"

MICROBATCH = Journey(
    "microbatch",
    "A micro-batch: from the data to its loss",
    (
        Step(f"{_LOOP}._one_step", "asks for this step's batch"),
        Step("threed.data.prefetch:Prefetcher.get", "waits, if the thread is behind"),
        Step(f"{_LOOP}._share_of_batch", "this data rank's samples of a step",
             note="called ahead, by the prefetcher's thread"),
        Step("threed.data.samples:Samples.batch", "tokens and labels, from a memory map"),
        Step("threed.training.bad_steps:BadSteps.step", "and its recomputation, if it is skipped",
             by="Loop._one_step", column=1),
        Step(f"{_ENGINE}.step", "one optimizer step"),
        Step("threed.pipeline.batches:Batches.micro_batches", "places and cuts the batch"),
        Step("threed.distributed.collectives:sum_of_scalars", "counts valid tokens of all data ranks", via=("_weight",)),
        Step("threed.zero.optimizer:Synchronous.run", "forwards and backwards, without the update", by="Engine.step"),
        Step("threed.planner.blueprint:Blueprint.lowered", "the schedule with these numbers",
             note="passed to the constructor", column=2),
        Step("threed.schedules.lowering:lower", "adds sends, receives, gathers, once"),
        Step(f"{_EXECUTOR}.run", "this rank's actions, one after another", by="Synchronous.run"),
        Step(f"{_EXECUTOR}._receive", "where the plan has it", note="by the table of handlers"),
        Step("threed.pipeline.transport:Links.receive", "on the link from that stage"),
        Step("threed.distributed.collectives:receive", "begins to receive"),
        Step(f"{_EXECUTOR}._forward", "of one micro-batch on one chunk",
             by="Executor.run", note="by the table of handlers"),
        Step(f"{_STAGE}.forward", "layer by layer"),
        Step("threed.zero.gather:Gatherer.ready", "waits for a layer's parameters"),
        Step("threed.layers.block:Block.forward", "attention and MLP on the residual",
             by="Stage.forward", note="called as a module: layer(x, micro)"),
        Step("threed.layers.mlp:MLP.forward", "up, activation, down", note="called as a module"),
        Step("threed.layers.linear:ColumnLinear.forward", "adds its bias", note="called as a module"),
        Step("threed.layers.linear:Product.product", "in one product, or tile by tile"),
        Step("threed.layers.linear:linear", "the weight's gradient goes past autograd"),
        Step("threed.layers.linear:_Linear.forward", "one function to autograd", note="by autograd"),
        Step("threed.distributed.collectives:all_gather", "f, where sequences are cut"),
        Step("threed.ops.matmul:linear", "the product", by="_Linear.forward", via=("product",)),
        Step("threed.layers.linear:RowLinear.forward", "the row product, then g",
             by="MLP.forward", note="called as a module"),
        Step("threed.layers.slicing:Slicing.reduce", "g: the sum of all ranks' products"),
        Step("threed.distributed.collectives:reduce_from", "sums over tensor ranks"),
        Step("threed.layers.loss:LanguageModelHead.forward", "logits, token losses, their weighted sum",
             by="Stage.forward", note="called as a module, on the last stage", column=3),
        Step("threed.layers.loss:_Projection.loss", "of this rank's logits"),
        Step("threed.ops.cross_entropy:weighted_loss", "three numbers a token from each rank"),
        Step(f"{_EXECUTOR}._send", "on the other stages", by="Executor.run", note="by the table of handlers"),
        Step("threed.pipeline.transport:Links.send", "on the link to that stage"),
        Step("threed.distributed.collectives:send", "begins to send"),
        Step(f"{_ENGINE}._end_step", "ends the step, with this rank's loss", by="Engine.step"),
        Step("threed.zero.optimizer:Synchronous.update", "of the weights, by the summed gradients"),
        Step("threed.zero.optimizer:Optimizer.step", "carries it with the norm"),
        Step("threed.distributed.collectives:start_sum_of_scalars", "the sum over all ranks", via=("start_step",)),
        Step("threed.training.step_log:StepLog.after_step", "a callback, collects metrics",
             by="Loop._one_step", column=5),
        Step("threed.zero.step_metrics:StepMetrics.loss", "read where it is logged"),
    ),
)  # fmt: skip

_REDUCER = "threed.zero.reducer:Reducer"
_REDUCTIONS = "threed.zero.reductions:Reductions"
_SINK = "threed.zero.reducer:Sink"
_OPTIMIZER = "threed.zero.optimizer:Optimizer"

GRADIENT = Journey(
    "gradient",
    "A gradient: from a layer's backward to the next step's parameters",
    (
        Step(f"{_ENGINE}.step", "one optimizer step"),
        Step("threed.zero.optimizer:Synchronous.run", "forwards and backwards"),
        Step(f"{_EXECUTOR}.run", "walks this rank's plan"),
        Step(f"{_EXECUTOR}._backward", "of one micro-batch on one chunk", note="by the table of handlers"),
        Step(f"{_STAGE}.backward", "layer by layer, from the last", via=("_run_backward", "_differentiate")),
        Step("threed.layers.linear:_Linear.backward", "of a linear layer",
             note="by autograd, through the stage's graph"),
        Step("threed.layers.linear:gradients", "dx and dW of a linear layer"),
        Step("threed.layers.linear:weight_gradient", "asks the weight for its sink"),
        Step("threed.distributed.collectives:start_all_reduce", "dx is summed over tensor ranks meanwhile", by="gradients"),
        Step(f"{_SINK}.add_product", "of one parameter; counts contributions",
             by="weight_gradient", note="handed down as weight.sink, a GradSink"),
        Step("threed.zero.reductions:FullGradients.view", "where in the flat buffer it goes", via=("_target",)),
        Step("threed.ops.matmul:add_product_", "the product, into the buffer itself", by="Sink.add_product"),
        Step(f"{_REDUCER}.mark_complete", "is the next bucket ready?", by="Sink.add_product",
             via=("mark_added",), column=1),
        Step(f"{_REDUCER}._launch", "the next bucket of the queue"),
        Step(f"{_REDUCTIONS}.launch", "its window into its slice"),
        Step("threed.distributed.collectives:start_reduce_scatter", "begins the sum over data ranks"),
        Step(f"{_REDUCTIONS}.make_room", "are too many in flight?", by="Reducer._launch"),
        Step(f"{_REDUCTIONS}.wait_oldest", "then waits for one"),
        Step(f"{_REDUCTIONS}._store", "the slice is complete"),
        Step("threed.zero.reductions:squares", "its part of the norm", via=("store",)),
        Step("threed.memory.tiers:start_copy", "to where slices are stored", by="Reductions.wait_oldest"),
        Step(f"{_ENGINE}._end_step", "after the last backward", by="Engine.step"),
        Step("threed.zero.optimizer:Synchronous.update", "waits for gradients, updates weights"),
        Step(f"{_REDUCER}.finish", "every slice of the sum, in order"),
        Step(f"{_OPTIMIZER}.step", "norm, clip, skip flag, rate: all tensors",
             by="Synchronous.update"),
        Step("threed.distributed.collectives:start_sum_of_scalars", "norm and loss in one message", via=("start_step",)),
        Step(f"{_OPTIMIZER}._update", "bucket by bucket, in forward order",
             by="Optimizer.step", via=("start_step", "_apply", "_start_update", "_update_all")),
        Step("threed.ops.adam:Adam.update", "weights and moments of a slice", via=("_apply_rule",)),
        Step("threed.zero.gather:Gatherer.publish", "this bucket has new values", by="Optimizer._update"),
        Step("threed.distributed.collectives:start_all_gather", "begins to gather the others' slices", via=("_publish",)),
        Step(f"{_STAGE}.forward", "layer by layer, in the next step", by="Gatherer.publish",
             note="begins while gathers are under way", column=5),
        Step("threed.zero.gather:Gatherer.ready", "waits for this layer's buckets only"),
        Step("threed.distributed.collectives:Pending.wait", "they are whole", via=("_wait_for",)),
    ),
)  # fmt: skip

JOURNEYS = (CONFIG, MICROBATCH, GRADIENT)


@dataclass
class Box:
    """A drawn step: its number, column, and the place of its box."""

    step: Step
    number: int
    column: int
    lane: int
    y: float = 0.0
    height: float = 0.0

    @property
    def x(self) -> float:
        """The left edge."""
        return LEFT + self.column * (WIDTH + GUTTER)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What is written below the name: lines, and how."""
        what = [(line, ' fill="#4b5563"') for line in wrap(self.step.what, WIDTH)]
        note = self.step.note if self.step.note != "begins" else ""
        return what + [(line, f' font-style="italic" fill="{PAPER}"') for line in wrap(note, WIDTH)]


def place(journey: Journey) -> dict[str, Box]:
    """The boxes by `where`: each below the one before, or in the next column where that would be above it."""
    boxes: dict[str, Box] = {}
    before: Step | None = None
    callers = {step: caller for caller, step in journey.calls()}
    for step in (step for step in journey.steps if step.what):
        column = 0 if before is None else boxes[before.where].column + (step.floor > before.floor)
        column = column if step.column is None else step.column
        caller = callers.get(step)
        lane = (
            boxes[caller.where].lane + 1 if caller is not None and caller.floor == step.floor else 0
        )
        own = [
            box.lane
            for box in boxes.values()
            if (box.column, box.step.floor) == (column, step.floor)
        ]
        boxes[step.where] = Box(
            step, len(boxes) + 1, column, max([lane, *(other + 1 for other in own)])
        )
        before = step
    return boxes


def arrange(boxes: dict[str, Box]) -> tuple[list[str], float]:
    """Gives every box its height; the grounds of the floors, and where they end."""
    parts, y = [], 60.0
    width = max(box.x for box in boxes.values()) + WIDTH + GUTTER - 30
    for floor in STYLES:
        here = [box for box in boxes.values() if box.step.floor == floor]
        top, y = y, y + MARGIN
        for lane in range(max((box.lane for box in here), default=-1) + 1):
            row = [box for box in here if box.lane == lane]
            height = 36 + LINE * max((len(box.lines) for box in row), default=0)
            for box in row:
                box.y, box.height = y, height
            y += height + LANE
        y += MARGIN - LANE if here else MARGIN
        parts += draw_band(floor, top, width, y - top)
        y += 8
    return parts, y


def draw_box(box: Box) -> Iterator[str]:
    """A step: its number, its file, its name, and what happens."""
    colour = PAPER if box.step.paper else STYLES[box.step.floor][1]
    size = f'width="{WIDTH}" height="{box.height:g}" rx="3"'
    yield f'<rect x="{box.x:g}" y="{box.y:g}" {size} fill="#ffffff" stroke="{colour}"/>'
    yield write(
        box.x + 7,
        box.y + 13,
        f"{box.number}  {box.step.file}",
        SIZE,
        mono=True,
        more=f' fill="{colour}"',
    )
    yield write(
        box.x + 7,
        box.y + 26,
        box.step.name,
        SIZE,
        mono=True,
        more=f' font-weight="600" fill="{DARK}"',
    )
    for number, (line, more) in enumerate(box.lines):
        yield write(box.x + 7, box.y + 39 + number * LINE, line, SIZE, more=more)


def route(caller: Box, box: Box, boxes: dict[str, Box]) -> list[tuple[float, float]]:
    """The corners of an arrow: straight down where nothing is between, else through the gaps between boxes."""
    near = [b for b in boxes.values() if b.column == box.column and caller.y < b.y < box.y]
    if caller.column == box.column and caller.y < box.y and not near:
        middle = box.x + WIDTH / 2
        return [(middle, caller.y + caller.height), (middle, box.y)]
    up, right = box.y < caller.y, box.column < caller.column
    aside = 7 + 3 * (caller.number % 5)
    begin = caller.x + (20 if right or caller.column == box.column else WIDTH - 20)
    edge = box.x + WIDTH if right else box.x
    gutter = edge + aside if right else edge - aside
    leave = caller.y if up else caller.y + caller.height
    channel = leave + (-aside if up else aside) * 0.9
    end = box.y + 10 + (0 if caller.column == box.column else 5)
    return [(begin, leave), (begin, channel), (gutter, channel), (gutter, end), (edge, end)]


def draw_arrow(points: list[tuple[float, float]], dashed: bool, colour: str) -> Iterator[str]:
    """An arrow along some corners."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    corners = [*points[:-1], (x - 5 * dx, y - 5 * dy)]
    path = " L ".join(f"{a:g} {b:g}" for a, b in corners)
    more = ' stroke-dasharray="4 3"' if dashed else ""
    yield f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.2"{more}/>'
    bx, by = x - 6 * dx, y - 6 * dy
    sides = (bx + 3 * dy, by + 3 * dx), (bx - 3 * dy, by - 3 * dx)
    head = " L ".join(f"{a:g} {b:g}" for a, b in ((x, y), *sides))
    yield f'<path d="M {head} Z" fill="{colour}"/>'


def summary(journey: Journey) -> str:
    """How long the way is."""
    files = {step.file for step in journey.steps}
    arrows = [step.floor > caller.floor for caller, step in journey.calls()]
    helpers = sum(len(step.via) for step in journey.steps)
    steps = sum(bool(step.what) for step in journey.steps)
    up = f"{sum(arrows)} of {len(arrows)} arrows go up a floor"
    return f"{steps} functions and {helpers} helpers in {len(files)} files; {up}"


def draw(journey: Journey) -> str:
    """The picture as SVG."""
    boxes = place(journey)
    bands, y = arrange(boxes)
    arrows = [
        part
        for caller, step in journey.calls()
        for points in (route(boxes[caller.where], boxes[step.where], boxes),)
        for part in draw_arrow(points, bool(step.note), PAPER if step.paper else DARK)
    ]
    width = max(box.x for box in boxes.values()) + WIDTH + GUTTER + 30
    size = f'viewBox="0 0 {width:g} {y + 24:g}" width="{width:g}" height="{y + 24:g}"'
    legend = "a solid arrow is a plain call, a dashed one is made as its box says"
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{SANS}" role="img" aria-labelledby="t">',
                f'<title id="t">{journey.title}</title>',
                '<rect width="100%" height="100%" fill="#ffffff"/>',
                write(30, 28, journey.title, 15, more=f' font-weight="600" fill="{DARK}"'),
                write(30, 46, f"{summary(journey)}; {legend}", 11, more=' fill="#6b7280"'),
                *bands,
                *arrows,
                *(part for box in boxes.values() for part in draw_box(box)),
                "</svg>",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    for one in JOURNEYS:
        one.picture.write_text(draw(one), encoding="utf-8")
