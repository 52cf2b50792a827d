"""What a compiled program does, read from its optimised HLO: products, bytes and collectives, times trip counts.

XLA's own cost analysis counts the body of a loop once. Here every loop's body counts as often as it runs: as the
program says, or, where that is data, as the caller says.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Type, sizes and memory space of an array; space 0 is the device's main memory (HBM), 1 a TPU's VMEM."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Its size without the padding of its layout; 4-bit numbers take half a byte."""
        return self.elements * _dtype_bytes(self.dtype)

    @property
    def traffic(self) -> float:
        """Its size where it lies in main memory, 0 elsewhere."""
        return self.bytes if self.space == 0 else 0.0


Type = Shape | tuple["Type", ...]
"""Of an instruction's result: an array, or a tuple of results."""


def leaves(kind: Type) -> list[Shape]:
    """The arrays in a result, in order."""
    return [kind] if isinstance(kind, Shape) else [leaf for part in kind for leaf in leaves(part)]


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: its own.
        opcode: `dot`, `fusion`, `while`, ...
        type: of its result.
        operands: names of the instructions whose results it takes.
        inside: the text between its brackets: a parameter's number, a constant's value.
        attributes: the text behind the brackets, without metadata and backend configuration.
        op_name: the path of JAX scopes and primitives it came from; may be empty.
        trips: how often a loop runs, where the compiler says so.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    inside: str
    attributes: str
    op_name: str
    trips: int | None

    def attribute(self, name: str) -> str | None:
        """An attribute's value as written, without braces around it; None where there is none."""
        found = re.search(rf"(?:^|[ ,]){name}=(\{{[^{{}}]*\}}|[^,]*)", self.attributes)
        return found and found[1].strip("{}")

    def called(self, name: str) -> list[str]:
        """Names of the computations in an attribute."""
        return re.findall(r"%?([\w.\-]+)", self.attribute(name) or "")


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in order, and which of them is the result."""

    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its arguments, in order."""
        found = [x for x in self.instructions.values() if x.opcode == "parameter"]
        return sorted(found, key=lambda x: int(x.inside))

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """For each instruction those that take its result, and as which operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for number, name in enumerate(instruction.operands):
                found.setdefault(name, []).append((instruction, number))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A module of HLO.

    Attributes:
        computations: by name.
        entry: the one that runs.
        partitions: devices that a collective without groups spans.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    partitions: int


class HLOError(ValueError):
    """Text that is no HLO module as XLA prints it."""


# Reading


def parse(text: str) -> Program:
    """Reads a module as `compiled.as_text()` gives it.

    Raises:
        HLOError: there is no entry computation, or an instruction cannot be read.
    """
    computations: dict[str, Computation] = {}
    entry, name, is_entry = None, None, False
    instructions: dict[str, Instruction] = {}
    root = None
    for line in text.splitlines():
        if name is None:
            if opened := _OPENING.match(line):
                is_entry, name = bool(opened[1]), opened[2]
                instructions, root = {}, None
        elif line.startswith("}"):
            if root is None:
                raise HLOError(f"computation {name} has no ROOT")
            computations[name] = Computation(instructions, root)
            entry, name = computations[name] if is_entry else entry, None
        elif line.strip():
            instruction = _instruction(line)
            instructions[instruction.name] = instruction
            root = instruction if line.lstrip().startswith("ROOT ") else root
    if entry is None:
        raise HLOError("the text has no ENTRY computation; give what compiled.as_text() returns")
    counts = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])]
    return Program(computations, entry, math.prod(counts))


_OPENING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_START = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')


def _instruction(line: str) -> Instruction:
    start = _START.match(line)
    if start is None:
        raise HLOError(f"not an instruction: {line.strip()[:120]}")
    op_name, trips = _OP_NAME.search(line), _TRIPS.search(line)
    bare = re.sub(r"/\*.*?\*/", "", re.split(r", (?:metadata|backend_config)=", line, maxsplit=1)[0])
    kind, at = _type(bare, start.end())
    opcode = _OPCODE.match(bare, at)
    if opcode is None:
        raise HLOError(f"no operation in: {line.strip()[:120]}")
    end = _closing(bare, opcode.end())
    inside = bare[opcode.end() : end]
    return Instruction(
        name=start[1],
        opcode=opcode[1],
        type=kind,
        operands=() if opcode[1] in ("constant", "parameter") else tuple(_operands(inside)),
        inside=inside,
        attributes=bare[end + 1 :].lstrip(", "),
        op_name=op_name[1] if op_name else "",
        trips=int(trips[1]) if trips else None,
    )


def _operands(inside: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", inside) or re.findall(r"([\w.\-]+)", inside)


def _closing(text: str, at: int) -> int:
    """Where the bracket that was opened before `at` closes."""
    depth = 1
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise HLOError(f"an open bracket in: {text.strip()[:120]}")


def _type(text: str, at: int) -> tuple[Type, int]:
    """The type that begins at a place of a line, and where it ends."""
    if text[at] != "(":
        found = _ARRAY.match(text, at)
        if found is None:
            raise HLOError(f"no type in: {text[at:].strip()[:120]}")
        space = _SPACE.search(found[3] or "")
        dims = tuple(int(size.strip(" <=")) for size in found[2].split(",") if size.strip())
        return Shape(found[1], dims, int(space[1]) if space else 0), found.end()
    parts: list[Type] = []
    at += 1
    while text[at] != ")":
        part, at = _type(text, at)
        parts.append(part)
        at += len(re.match(r"[, ]*", text[at:])[0])  # pyright: ignore[reportOptionalSubscript]
    return tuple(parts), at + 1


@functools.cache
def _dtype_bytes(dtype: str) -> float:
    if dtype in ("token", "opaque"):
        return 0.0
    if dtype == "pred":
        return 1.0
    bits = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    if bits is None:
        raise HLOError(f"unknown type {dtype}")
    return int(bits[1]) / 8


# Loops


class Loop(NamedTuple):
    """A loop whose length is data."""

    op_name: str
    """The path of JAX scopes it came from."""
    carried: Type
    """What goes around in it."""


def trip_count(program: Program, caller: Computation, loop: Instruction) -> int | None:
    """How often a `while` of `caller` runs, if it counts from a constant to a constant; None where that is data."""
    if loop.trips is not None:
        return loop.trips
    condition = program.computations[loop.called("condition")[0]]
    body = program.computations[loop.called("body")[0]]
    compare, sides = _operation(program, condition, condition.root)
    if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "GT"):
        return None
    counter, limit = sides if compare.attribute("direction") == "LT" else reversed(sides)
    index = _element(counter, condition)
    begin = None if index is None else _initial(caller, loop, index)
    end = _value(caller, loop, condition, limit)
    step = None if index is None else _step(program, caller, loop, body, index)
    if begin is None or end is None or not step:
        return None
    return max(0, -((begin - end) // step))


def _operation(program: Program, where: Computation, x: Instruction) -> tuple[Instruction, list[Instruction]]:
    """An operation, be it written out or the last of a fusion, and what it takes, copies aside."""
    inner, outer = where, {}
    if x.opcode == "fusion":
        inner = program.computations[x.called("calls")[0]]
        outer = {p.name: where.instructions[o] for p, o in zip(inner.parameters, x.operands, strict=True)}
        x = inner.root
    taken = [_through_copies(inner, inner.instructions[name]) for name in x.operands]
    return x, [_through_copies(where, outer[side.name]) if side.name in outer else side for side in taken]


def _through_copies(where: Computation, x: Instruction) -> Instruction:
    while x.opcode in ("copy", "bitcast", "convert"):
        x = where.instructions[x.operands[0]]
    return x


def _element(x: Instruction, where: Computation) -> int | None:
    """Which element of the loop's carry this is, if any."""
    if x.opcode != "get-tuple-element" or where.instructions[x.operands[0]].opcode != "parameter":
        return None
    return int(x.attribute("index") or 0)


def _initial(caller: Computation, loop: Instruction, index: int) -> int | None:
    """The constant that an element of the carry begins as."""
    given = caller.instructions[loop.operands[0]]
    if given.opcode != "tuple":
        return None
    return _constant(_through_copies(caller, caller.instructions[given.operands[index]]))


def _constant(x: Instruction) -> int | None:
    return int(x.inside) if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside) else None


def _value(caller: Computation, loop: Instruction, where: Computation, x: Instruction) -> int | None:
    """The value of a constant, or of an element that begins as one; loops do not change their limits."""
    index = _element(x, where)
    return _constant(x) if index is None else _initial(caller, loop, index)


def _step(program: Program, caller: Computation, loop: Instruction, body: Computation, index: int) -> int | None:
    """What a turn adds to an element of the carry."""
    if body.root.opcode != "tuple":
        return None
    new = _through_copies(body, body.instructions[body.root.operands[index]])
    add, sides = _operation(program, body, new)
    if add.opcode != "add":
        return None
    other = [side for side in sides if _element(side, body) != index]
    return _value(caller, loop, body, other[0]) if len(other) == 1 else None


# Costs


class Collective(NamedTuple):
    """An exchange between devices."""

    kind: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    devices: int
    """In a group."""
    size: float
    """Bytes of the whole array on one device: of the result of an all-gather, of what goes into the others."""

    @property
    def moved(self) -> float:
        """Bytes that a device sends, by the algorithms on a ring."""
        if self.kind == "collective-permute":
            return self.size
        return self.size * (2 if self.kind == "all-reduce" else 1) * (self.devices - 1) / self.devices


@dataclasses.dataclass(frozen=True)
class Operation:
    """One scheduled operation: an instruction outside of fusions.

    Attributes:
        instruction: it.
        times: how often it runs.
        flops: of its matrix products and convolutions, once.
        passes: those flops, each times the passes that its precision takes on a bfloat16 unit (6 for full float32).
        bytes: that it reads from and writes to main memory, once.
        collectives: that it does.
    """

    instruction: Instruction
    times: float
    flops: float
    passes: float
    bytes: float
    collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind among so many devices, in one run of a program.

    Attributes:
        kind: `all-gather`, ...
        devices: in a group.
        count: how many run.
        bytes: that a device sends in all of them.
        largest: bytes that it sends in the largest.
    """

    kind: str
    devices: int
    count: float = 0.0
    bytes: float = 0.0
    largest: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of a program costs a device.

    Attributes:
        flops: of matrix products and convolutions; what is done number by number is left out.
        passes: the same, each times the passes that its precision takes, see `Operation`.
        bytes: read from and written to main memory.
        collectives: by kind and size of group, those that send most first.
    """

    flops: float
    passes: float
    bytes: float
    collectives: tuple[Traffic, ...]


def cost(program: Program, bound: Callable[[Loop], float | None]) -> Cost:
    """Sums over a program's operations, see `operations`."""
    flops = passes = moved = 0.0
    found: dict[tuple[str, int], Traffic] = {}
    for operation in operations(program, bound):
        times = operation.times
        flops += times * operation.flops
        passes += times * operation.passes
        moved += times * operation.bytes
        for one in operation.collectives:
            old = found.get((one.kind, one.devices), Traffic(one.kind, one.devices))
            count, sent = old.count + times, old.bytes + times * one.moved
            largest = max(old.largest, one.moved)
            found[one.kind, one.devices] = Traffic(one.kind, one.devices, count, sent, largest)
    return Cost(flops, passes, moved, tuple(sorted(found.values(), key=lambda traffic: -traffic.bytes)))


def operations(program: Program, bound: Callable[[Loop], float | None]) -> Iterator[Operation]:
    """Everything a program does, outermost first.

    Of a conditional, the branch that moves most bytes counts.

    Args:
        program: from `parse`.
        bound: how often a loop runs at most whose count is data; None counts it once.
    """
    return _operations(program, program.entry, 1.0, bound)


def _operations(
    program: Program, where: Computation, times: float, bound: Callable[[Loop], float | None]
) -> Iterator[Operation]:
    for instruction in where.instructions.values():
        if instruction.opcode == "while":
            trips = trip_count(program, where, instruction)
            if trips is None:
                trips = bound(Loop(instruction.op_name, instruction.type))
            inner = times * (1 if trips is None else trips)
            for part in ("condition", "body"):
                yield from _operations(program, program.computations[instruction.called(part)[0]], inner, bound)
        elif instruction.opcode == "call":
            yield from _operations(program, program.computations[instruction.called("to_apply")[0]], times, bound)
        elif instruction.opcode == "conditional":
            names = [n for a in _BRANCHES for n in instruction.called(a)]
            branches = [list(_operations(program, program.computations[name], times, bound)) for name in names]
            yield from max(branches, key=lambda done: sum(op.bytes * op.times for op in done), default=[])
        elif instruction.opcode not in _FREE and not instruction.opcode.endswith(("-done", "-update")):
            flops, passes = _flops(program, where, instruction)
            moved, found = _bytes(program, where, instruction), tuple(_collectives(program, where, instruction))
            if flops or moved or found:
                yield Operation(instruction, times, flops, passes, moved, found)


_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
    + ("opt-barrier", "domain", "add-dependency", "get-dimension-size")
)
"""Operations that touch no array."""


def _inner(program: Program, instruction: Instruction) -> Computation | None:
    """What an instruction fuses or does asynchronously."""
    names = instruction.called("calls")
    return program.computations.get(names[0]) if names else None


def _flops(program: Program, where: Computation, instruction: Instruction) -> tuple[float, float]:
    """Of the products in an instruction, fused ones included; and times their passes."""
    if inner := _inner(program, instruction):
        each = [_flops(program, inner, x) for x in inner.instructions.values()]
        return sum((f for f, _ in each), 0.0), sum((p for _, p in each), 0.0)
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0, 0.0
    left, right = (leaves(where.instructions[name].type)[0] for name in instruction.operands[:2])
    flops = 2.0 * (_dot if instruction.opcode == "dot" else _convolution)(instruction, left, right)
    precise = {"highest": 6, "high": 3}.get((instruction.attribute("operand_precision") or "").split(",")[0], 1)
    return flops, flops * (precise if left.dtype == "f32" else 1)


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text or "")]


def _dot(instruction: Instruction, left: Shape, right: Shape) -> int:
    """Multiplications of a product of matrices."""
    del right
    contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
    return leaves(instruction.type)[0].elements * math.prod(left.dims[at] for at in contracted)


def _convolution(instruction: Instruction, left: Shape, right: Shape) -> int:
    """Multiplications of a convolution, without those with padding or with the holes of a dilation.

    A TPU's compiler writes products of matrices, batched ones too, as convolutions in which most places are padding.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if labels is None:
        raise HLOError(f"convolution {instruction.name} has no dim_labels")
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute("window") or ""))
    groups = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    result = leaves(instruction.type)[0]
    places = 1
    for axis in sorted(set(labels[1]) - set("bf")):
        at = int(axis)
        places *= _valid_places(
            left.dims[labels[1].index(axis)],
            right.dims[labels[2].index(axis)],
            result.dims[labels[3].index(axis)],
            **{name: _window_field(window, name, at) for name in ("stride", "lhs_dilate", "rhs_dilate")},
            pad=_window_field(window, "pad", at),
        )
    features = left.dims[labels[1].index("f")] // groups * result.dims[labels[3].index("f")]
    return places * features * (left.dims[labels[1].index("b")] // batches)


def _window_field(window: Mapping[str, str], name: str, at: int) -> int:
    """A number of a convolution's window along one axis; of padding, that in front."""
    default = 0 if name == "pad" else 1
    parts = window[name].split("x") if name in window else []
    return int(parts[at].split("_")[0]) if parts else default


@functools.cache
def _valid_places(size: int, kernel: int, out: int, *, stride: int, lhs_dilate: int, rhs_dilate: int, pad: int) -> int:
    """Pairs of an output's and a kernel's place along an axis that meet a number of the input."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * rhs_dilate - pad
    return int(np.sum((at >= 0) & (at % lhs_dilate == 0) & (at // lhs_dilate < size)))


# Bytes


def _bytes(program: Program, where: Computation, x: Instruction) -> float:
    """What an instruction reads from main memory and writes to it; of slices and updates in place, the part alone."""
    given = [where.instructions[name] for name in x.operands]
    if inner := _inner(program, x):
        reads = sum(
            _used(program, inner, parameter) * _traffic(operand)
            for parameter, operand in zip(inner.parameters, given, strict=False)
        )
        return reads + _written(inner, inner.root)
    if x.opcode == "custom-call" and x.attribute("custom_call_target") == '"AllocateBuffer"':
        return 0.0
    if x.opcode.endswith("-start"):
        result = x.type if isinstance(x.type, Shape) else x.type[min(1, len(x.type) - 1)]
        # copy-start's tuple begins with the copy, the collectives' with what is sent.
        result = x.type[0] if x.opcode == "copy-start" and not isinstance(x.type, Shape) else result
        return sum(map(_traffic, given), sum((leaf.traffic for leaf in leaves(result)), 0.0))
    if x.opcode in _SLICES:
        taken = leaves(x.type)[0]
        source = leaves(given[0].type)[0]
        return taken._replace(space=source.space).traffic + taken.traffic + sum(map(_traffic, given[1:]))
    if x.opcode in _UPDATES:
        return _traffic(given[_UPDATES[x.opcode]]) + _written(where, x)
    return sum(map(_traffic, given), _traffic(x))


_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand in place, and which operand the part is."""
_ONE_TO_ONE = ("bitcast", "convert", "copy", "reshape", "transpose", "negate")


def _traffic(x: Instruction) -> float:
    return sum((leaf.traffic for leaf in leaves(x.type)), 0.0)


def _used(program: Program, where: Computation, x: Instruction) -> float:
    """The share of a value inside of a fusion that is looked at, in [0, 1]."""
    whole = sum(leaf.bytes for leaf in leaves(x.type))
    if x is where.root or not whole:
        return 1.0
    share = 0.0
    for user, number in where.users.get(x.name, []):
        if user.opcode in _SLICES and number == 0:
            share += sum(leaf.bytes for leaf in leaves(user.type)) / whole
        elif user.opcode == "dynamic-update-slice" and number == 0:
            share += 0.0
        elif x.opcode == "parameter" and user is where.root and user.opcode == "tuple":
            share += 0.0  # handed through
        elif user.opcode == "scatter" and number == 0:
            share += sum(leaf.bytes for leaf in leaves(where.instructions[user.operands[2]].type)) / whole
        elif user.opcode in _ONE_TO_ONE:
            share += _used(program, where, user)
        elif inner := _inner(program, user):
            share += _used(program, inner, inner.parameters[number])
        else:
            share += 1.0
        if share >= 1:
            return 1.0
    return share


def _written(where: Computation, root: Instruction) -> float:
    """Bytes that a fusion's result takes to write: the part that is new of an array updated in place."""
    if root.opcode == "tuple":
        return sum((_written(where, where.instructions[name]) for name in root.operands), 0.0)
    if root.opcode == "parameter" or _goes_on(where, root):
        return 0.0
    result = leaves(root.type)
    x = root
    while x.opcode in _ONE_TO_ONE:
        x = where.instructions[x.operands[0]]
    if x.opcode not in _UPDATES:
        return sum((leaf.traffic for leaf in result), 0.0)
    new = leaves(where.instructions[x.operands[_UPDATES[x.opcode]]].type)[0]
    return new._replace(dtype=result[0].dtype, space=result[0].space).traffic


# Collectives

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def _collectives(program: Program, where: Computation, x: Instruction) -> Iterator[Collective]:
    if inner := _inner(program, x):
        for instruction in inner.instructions.values():
            yield from _collectives(program, inner, instruction)
        return
    kind = _kind(x)
    if kind not in KINDS or _goes_on(where, x):
        return
    sent = sum((leaf.bytes for name in x.operands for leaf in leaves(where.instructions[name].type)), 0.0)
    devices = group_size(x.attributes, program.partitions)
    if kind != "collective-permute" and devices == 1:
        return
    yield Collective(kind, devices, sent * devices if kind == "all-gather" else sent)


def _kind(x: Instruction) -> str:
    return x.opcode.removesuffix("-start").replace("ragged-all-to-all", "all-to-all")


def _goes_on(where: Computation, x: Instruction) -> bool:
    """Whether a collective in a fusion is the going on, or the end, of one that began in another.

    A TPU's compiler fuses steps of a collective with the products it hides behind: each such fusion has the collective
    in it, in a chain whose first alone starts it.
    """
    starts = [i for i in where.instructions.values() if i.attribute("custom_call_target") == '"AsyncCollectiveStart"']
    return _kind(x) in KINDS and "chain_id=" in x.attributes and not starts


def group_size(attributes: str, everyone: int) -> int:
    """Devices in a group of a collective, from its `replica_groups`.

    Three spellings are read: lists `{{0,1},{2,3}}`; counts `[2,4]<=[8]`, two groups of four; and axes of a mesh,
    `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}`, where a part of an axis is `'y':(2)2`.

    Args:
        attributes: of the instruction.
        everyone: what no groups at all means.

    Raises:
        HLOError: it is spelled in another way.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{_DEVICE_IDS} \{{([^}}]*)\}}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        raise HLOError(f"groups of devices in an unknown form: {attributes[:120]}")
    return everyone


_DEVICE_IDS = r"(?:, device_ids=\(\[[\d,]*\](?:T\([\d,]*\))?\))?"
"""In what order a mesh has its devices."""
