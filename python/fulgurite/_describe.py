"""The description of a call as text: everything but the tensors.

The text is the key of prepared calls, and the only thing that a compiled torch graph stores about a call, so it is
complete. `python/src/description.rs` parses it and documents the entries.
"""

from __future__ import annotations

# For measurements: changes of the configuration that gradients have on a GPU, as "head_splits=4 pairs=8".
backward_tuning = ""
# For measurements: the tile configuration of forward by mma.sync on a GPU, as "blocks=2 cols=64".
sync_tuning = ""

_CAUSAL = {"bottom-right": "causal bottom-right;", "top-left": "causal top-left;"}


def options(causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic=False, precision=None) -> str:
    """The entries of numbers and names. Their reader checks the values, except those that only Python can check."""
    text = ""
    if causal is True:
        text += _CAUSAL["bottom-right"]
    elif causal is not False and causal is not None:
        if not isinstance(causal, str) or causal not in _CAUSAL:
            raise ValueError(f'`causal` is {causal!r}, allowed: True, False, "bottom-right", "top-left"')
        text += _CAUSAL[causal]
    if window is not None:
        left, right = pair("window", window, "keys before and after the diagonal, None for all")
        # A negative side is an offset, but then the other one must reach further.
        if type(left) is int and type(right) is int and left + right < 0:
            raise ValueError(f"`window` is {(left, right)}, which hides every key, allowed: None for an unbounded side")
        text += f"window {_side(left)} {_side(right)};"
    if scale is not None:
        text += f"scale {_number('scale', scale)};"
    if softcap is not None:
        text += f"softcap {_number('softcap', softcap)};"
    if tau is not None:
        if rescale is not None:
            raise ValueError(f"`tau` is {tau} and `rescale` is {rescale!r}; tau=T means rescale='lazy:T', give one")
        rescale = f"lazy:{_number('tau', tau)}"
    for key, name in (("exp", exp), ("rescale", rescale), ("engine", engine), ("precision", precision)):
        if name is not None:
            text += f"{key} {_word(key, name)};"
    if threads is not None:
        text += f"threads {_integer('threads', threads)};"
    if deterministic not in (True, False):
        raise ValueError(f"`deterministic` is {deterministic!r}, allowed: True, False")
    if deterministic:
        text += "order fixed;"
    if backward_tuning:
        text += f"backward {backward_tuning};"
    if sync_tuning:
        text += f"sync_tuning {sync_tuning};"
    return text


def longest(max_lengths) -> str:
    """Upper bounds of the lengths of packed sequences, rounded up so that growing lengths give few descriptions."""
    q, k = pair("max_lengths", max_lengths, "the longest of queries and of keys, None where it is not known")
    q, k = (None if n is None else int(_integer("max_lengths", n)) for n in (q, k))
    for n in (q, k):
        if n is not None and n < 0:
            raise ValueError(f"`max_lengths` is {n}, allowed: 0 or more")
    # Only short queries select another kernel.
    q = None if q is None or q > 64 else q
    if q is None and k is None:
        return ""
    words = ("-" if n is None else f"{1 << max(n - 1, 0).bit_length()}" for n in (q, k))
    return f"longest {' '.join(words)};"


def pair(name, values, meaning):
    """Two values, or an error that explains their meaning."""
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        what = f"{len(values)} values" if isinstance(values, (tuple, list)) else f"one {type(values).__name__}"
        raise ValueError(f"`{name}` is {what}, allowed: a pair, {meaning}")
    return values


def _side(value):
    return "-" if value is None else _integer("window", value)


def _integer(name, value):
    if isinstance(value, float) or not hasattr(value, "__index__"):
        raise ValueError(f"`{name}` is {value!r}, allowed: an integer")
    return f"{int(value)}"


def _number(name, value):
    if isinstance(value, (str, bytes)):
        raise ValueError(f"`{name}` is {value!r}, allowed: a number")
    try:
        return f"{float(value)!r}"
    except (TypeError, ValueError, OverflowError) as cause:
        raise ValueError(f"`{name}` is {value!r}, allowed: a number") from cause


def _word(name, value):
    if not isinstance(value, str) or not value or any(c in " ;\t\n\r\f\v" for c in value):
        raise ValueError(f"`{name}` is {value!r}, allowed: a name; `fulgurite.attention` lists them")
    return value


class Extras:
    """The tensors of a call besides q, k and v, and their entries in the description."""

    __slots__ = ("entries", "names", "tensors")

    def __init__(self):
        self.entries = ""
        self.tensors = []
        self.names = []

    def add(self, role, tensor):
        """Adds a tensor with a dedicated role: sinks, offsets, lengths, block lists."""
        self.entries += f"with {role};"
        self.tensors.append(tensor)

    def aux(self, name, tensor, grad):
        """Adds a tensor that modifiers read under this name."""
        if name in self.names:
            return
        self.names.append(name)
        self.entries += f"with aux {name} grad;" if grad else f"with aux {name};"
        self.tensors.append(tensor)

    def at(self, name) -> int:
        """The index of the tensor that modifiers read under this name."""
        return [role.split()[1:2] for role in roles(self.entries)].index([name])

    def entry(self, text):
        """Adds an entry without a tensor."""
        self.entries += text


def roles(text: str) -> list[str]:
    """The role of each tensor besides q, k and v, in order."""
    return [entry[5:] for entry in text.split(";") if entry.startswith("with ")]


def gradients(text: str) -> list[int]:
    """Which tensors besides q, k and v have gradients."""
    words = [role.split() for role in roles(text)]
    # Compare the position, not the name: a tensor may be called `grad`.
    return [at for at, role in enumerate(words) if role == ["sinks"] or role[2:] == ["grad"]]


_ARITY = dict.fromkeys(("neg", "abs", "exp", "log", "sqrt", "tanh", "not", "float", "floor"), 1)
_ARITY.update(dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "eq", "lt", "le", "and", "or"), 2))
_ARITY["select"] = 3
# Conditions for which engines have a closed form.
_DIAGONAL = "add q sub k_len q_len"
_KNOWN = {"le k q": _CAUSAL["top-left"], f"le k {_DIAGONAL}": _CAUSAL["bottom-right"], "true": ""}


def _end(words: list[str], at: int) -> int:
    """The end of the expression that starts at a word."""
    open_ = 1
    while open_:
        if words[at] == "load":
            open_ += int(words[at + 2]) - 1
            at += 3
        else:
            open_ += _ARITY.get(words[at], 0) - 1
            at += 1
    return at


def mask_entries(text: str) -> str:
    """A mask as entries that must all hold: causal and sliding window by name, the rest as expressions."""
    words, entries, at, open_ = text.split(), "", 0, 1
    while open_:
        if words[at] == "and":
            at, open_ = at + 1, open_ + 1
            continue
        end = _end(words, at)
        part = words[at:end]
        at, open_ = end, open_ - 1
        if part[:2] == ["lt", "sub"] and " ".join(part[2:7]) == _DIAGONAL and part[8:] == ["k"] and part[7][0] == "i":
            entries += f"window {int(part[7][1:]) - 1} -;"  # diagonal - W < k
        else:
            entries += _KNOWN.get(" ".join(part), f"mask {' '.join(part)};")
    return entries
