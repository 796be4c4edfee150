"""The compiled half: attention on arrays of other libraries. Use the package."""

from collections.abc import Sequence
from typing import Any, final

__version__: str

@final
class Description:
    """What a call asks for, as text, with what was prepared for it; `python/src/description.rs` has the entries."""

    def __new__(cls, text: str) -> Description: ...
    def forward(self, q: Any, k: Any, v: Any, extras: Sequence[Any], out: Any | None, want_lse: bool) -> Any:
        """o, or (o, lse)."""

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        extras: Sequence[Any],
        saved: tuple[Any, Any, Any, Any | None],
        out: list[Any] | None,
    ) -> list[Any]:
        """Gradients of q, k, v and of each of `extras` that has one; `saved` is (o, lse, d_o, d_lse)."""

    def judge(
        self,
        q: Any,
        k: Any,
        v: Any,
        extras: Sequence[Any],
        results: Sequence[Any],
        saved: tuple[Any, Any, Any, Any | None] | None = None,
    ) -> list[Judged]:
        """Compares [o] or [o, lse], or with `saved` the gradients, with the f64 oracle, by the tolerance rule."""

    def counted(self, q: Any, k: Any, v: Any, extras: Sequence[Any]) -> tuple[Any, Any, list[int]]:
        """o, lse, and the counters: rescales possible, rescales done, blocks computed again."""

    def explain(self, q: Any, k: Any, v: Any, extras: Sequence[Any]) -> list[str]:
        """Which engine computes this call and why, in one line each."""

    def check(self, arrays: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Raises ValueError unless arrays of these types and shapes fit: q, k, v, then one for each role."""

    def time(self, q: Any, k: Any, v: Any, out: Any, times: int) -> float:
        """Seconds that the engine takes for `times` forward calls, everything around it done once."""

@final
class Judged:
    """One tensor of a call beside the oracle's."""

    name: str
    ok: bool
    allowed: float
    text: str

@final
class Variant:
    """A variant of attention as text, prepared for many calls; `python/src/variants` has the entries."""

    def __new__(cls, text: str) -> Variant: ...
    def forward(self, tensors: Sequence[Any]) -> list[Any]:
        """The outputs, in new arrays of the same kind as the first tensor."""

    def counted(self, tensors: Sequence[Any]) -> tuple[list[Any], SkipCounts]:
        """The outputs of block skipping, and how many tiles each level kept."""

    def backward(self, tensors: Sequence[Any], outputs: Sequence[Any], d_outputs: Sequence[Any | None]) -> list[Any]:
        """Gradients of the tensors that have one, from the gradients of the outputs, each of which may be None."""

    def judge(
        self,
        tensors: Sequence[Any],
        outputs: Sequence[Any],
        d_outputs: Sequence[Any | None] | None = None,
        gradients: Sequence[Any] | None = None,
    ) -> list[Judged]:
        """Compares the outputs, or the gradients if they are given, with the f64 oracle, by the tolerance rule."""

    def time(self, tensors: Sequence[Any], times: int) -> float:
        """Seconds that the engine takes for `times` forward calls into the same outputs."""

@final
class SkipCounts:
    """How many tiles each level of block skipping kept, and a bound of the error of the in-kernel level."""

    visible: int
    by_class: int
    by_proxy: int
    kept: int
    error_bound: float

@final
class Cache:
    """A key/value cache of one sequence; `fulgurite.KvCache` is its public form."""

    def __new__(
        cls,
        sizes: list[int],
        float: str | None,
        packed: tuple[list[int], list[int]] | None,
        engine: str,
        threads: int | None,
    ) -> Cache: ...
    @staticmethod
    def load(contents: tuple[dict[str, str], dict[str, bytes]], engine: str, threads: int | None) -> Cache: ...
    def save(self) -> tuple[dict[str, str], dict[str, bytes]]: ...
    def append(self, k: Any, v: Any) -> None: ...
    def attend(self, q: Any, scale: float) -> tuple[Any, Any]: ...
    def truncate(self, len: int) -> None: ...
    def fork(self) -> Cache: ...
    def get(self, token: int, head: int) -> list[list[float]] | None: ...
    def usage(self) -> tuple[int, int, float]: ...
    def spec(self) -> tuple[list[int], str | None, tuple[list[int], list[int]] | None]: ...

def head_bits(rows: Any, two: int) -> list[int]:
    """Bits of each head from calibration rows `[tokens, heads, dim]`."""

@final
class Outcome:
    """How one case of the table went on an engine."""

    features: list[str]
    case: str
    refused: bool
    share: float
    failures: list[str]

@final
class Gpu:
    """A GPU of this machine, for measurements of kernels."""

    def __new__(cls, ordinal: int = 0, cache: str | None = None, ptxas: str | None = None) -> Gpu: ...
    @property
    def name(self) -> str: ...
    def gemm(
        self,
        dtype: str,
        layout: str,
        a: tuple[int, ...],
        b: tuple[int, ...],
        c: tuple[int, ...],
        stream: int,
        tuning: tuple[int, int, int, int, int] | None = None,
    ) -> None: ...

def tensor_operators() -> list[tuple[str, str, list[str]]]: ...
def apply(name: str, arrays: Sequence[Any], engine: str) -> Any: ...
def block_lists(
    mask: str, sizes: list[int], block: list[int], names: list[str], tensors: list[Any]
) -> tuple[list[list[int]], list[list[int]]]: ...
def check(engine: str, dtype: str) -> list[Outcome]: ...
def set_sm_margin(device: int, count: int) -> None: ...
def engines() -> list[str]:
    """The engines this machine can run, fastest first; the last is the f64 oracle."""

def xla_targets() -> dict[str, dict[str, Any]]:
    """The functions that JAX registers with XLA, as capsules, by platform and name."""

def explain(engine: str) -> list[str]: ...
def gemm_rate(threads: int) -> float: ...
def read_sum(arrays: list[Any], threads: int) -> tuple[int, float]: ...

@final
class Clusters:
    """k-means of an array, or of the rows of a `.npy` file."""

    def __new__(cls, points: Any, asked: dict[str, Any], batch: int | None = None, memory_bytes: int = ...) -> Clusters: ...
    def sizes(self) -> tuple[int, int, int, float, int]:
        """Points, clusters, dimensions, inertia, steps."""

    def write(self, labels: Any, centroids: Any) -> None: ...

def assign(
    points: Any, centroids: Any, metric_name: str, threads: int | None, labels: Any | None, distances: Any | None
) -> float: ...

def assign_and_sum(
    points: Any, centroids: Any, metric_name: str, threads: int | None, labels: Any
) -> tuple[bytes, list[int], float]: ...

@final
class Index:
    """Rows that can be searched, exactly or in inverted lists (their number, the seed and the steps of k-means)."""

    def __new__(
        cls, points: Any, asked: tuple[str, float | None, int | None], lists: tuple[int, int, int] | None = None
    ) -> Index: ...
    def search(self, queries: Any | None, k: int, probes: int, rows: Any, distances: Any) -> None: ...
    def recall(self, queries: Any, k: int, probes: int) -> float: ...

def hdbscan(
    points: Any, asked: tuple[int, int | None, bool, int | None], labels: Any, probabilities: Any
) -> list[float]: ...
def dbscan(points: Any, asked: tuple[float, int, int | None], labels: Any) -> list[int]: ...
def svd(
    points: Any, asked: tuple[int, float | None, int, int | None], components: Any, mean: Any | None
) -> tuple[list[float], list[float], list[float], bool]: ...
def project(
    points: Any, components: Any, mean: Any | None, threads: int | None, out: Any
) -> None: ...
