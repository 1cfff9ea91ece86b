"""What an HLO module, as text, sends to other devices, asks of its host, and draws at random."""

import dataclasses
import math
import re

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HOST = ("infeed", "outfeed", "recv", "send")
_RANDOM = ("rng", "rng-bit-generator", "rng-get-and-update-state")

# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": the multipliers of Philox4x32
# and what its key grows by each round; the constant that a Threefry key schedule begins with.
_PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)
_THREEFRY = 0x1BD11BDA

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a module.

    Attributes:
      shape: of the result, as text.
      opcode: such as "all-reduce".
      rest: operands and attributes, as text.
    """

    shape: str
    opcode: str
    rest: str

    @property
    def elements(self):
        """Numbers in the result, all members of a tuple together."""
        return sum(_elements(sizes) for _, sizes in _ARRAY.findall(self.shape))

    @property
    def bytes(self):
        """Bytes of the result, without what a layout pads."""
        found = _ARRAY.findall(self.shape)
        return sum(_elements(sizes) * _width(dtype) for dtype, sizes in found)


def instructions(text):
    """Every instruction of a module, those inside fusions and loops too, in order."""
    found = []
    for line in text.splitlines():
        head, equals, tail = line.partition(" = ")
        if not equals or not re.fullmatch(r"\s*(ROOT )?%?[\w.\-]+", head):
            continue
        end = _end_of_shape(tail)
        opcode = re.match(r"([a-z][\w\-]*)\(", tail[end:].lstrip())
        if opcode:
            rest = tail[end:].lstrip()[opcode.end() - 1 :]
            found.append(Instruction(tail[:end], opcode.group(1), rest))
    return found


def collectives(found):
    """The instructions that send something to other replicas; a started one counts once."""
    return [i for i in found if i.opcode.removesuffix("-start") in COLLECTIVES]


def host_calls(found):
    """Opcodes and custom-call targets by which a program would wait for its host."""
    calls = [i.opcode for i in found if i.opcode.removesuffix("-done") in _HOST]
    for instruction in found:
        if instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
            if re.search(r"callback|host|python|PyFunc|send|recv", target.group(1), re.I):
                calls.append(target.group(1))
    return calls


def custom_calls(found):
    """Sorted names of what the compiler calls that is not HLO."""
    text = " ".join(i.rest for i in found if i.opcode == "custom-call")
    return sorted(set(re.findall(r'custom_call_target="([^"]*)"', text)))


def generators(found):
    """The sorted names of the random generators in a module that no compiler has changed yet.

    XLA has instructions that leave the algorithm to the platform; TensorFlow writes Philox and
    Threefry out in integer arithmetic, known by its constants.
    """
    names = {i.opcode for i in found if i.opcode in _RANDOM and "rng_philox" not in i.rest}
    names |= {"philox" for i in found if i.opcode in _RANDOM and "rng_philox" in i.rest}
    constants = {i.rest.split(")")[0][1:] for i in found if i.opcode == "constant"}
    if all(str(value) in constants for value in _PHILOX):
        names.add("philox")
    if str(_THREEFRY) in constants:
        names.add("threefry")
    return sorted(names)


def precisions(found):
    """{precision: number of matrix products and convolutions that ask for it}, sorted.

    Of float32 operands, "default" is what a TPU does in one pass, after rounding them to bfloat16;
    "highest" is float32 in six.
    """
    counts = {}
    for instruction in found:
        if instruction.opcode in ("convolution", "dot"):
            asked = re.search(r"operand_precision=\{([a-z]+)", instruction.rest)
            name = asked.group(1) if asked else "default"
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _end_of_shape(tail):
    """Where the shape at the beginning of ``tail`` ends; tuples have spaces and parentheses."""
    if not tail.startswith("("):
        return tail.find(" ")
    depth = 0
    for place, character in enumerate(tail):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    return -1


def _elements(sizes):
    return math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)


def _width(dtype):
    bits = _BITS.search(dtype)
    return int(bits.group()) / 8 if bits else 1
