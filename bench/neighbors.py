"""Clusters, neighbours and components beside scikit-learn, faiss and hdbscan: one process, contenders in turn, medians.

    python3 -m venv target/neighbors-venv
    target/neighbors-venv/bin/pip install -r bench/requirements-neighbors.txt
    target/neighbors-venv/bin/python bench/neighbors.py [kmeans|knn|hdbscan|svd|bits|memory|file ...] --json FILE

Uses the extension as it is (`python/build.py` builds it). Parts that are run replace those in FILE, the others stay. The exit status is
1 when an answer is wrong or a bar is missed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

# The OpenBLAS inside faiss-cpu's wheel (0.3.15) does not know newer CPUs and falls back to 128-bit kernels, a third of the speed: it is
# told what it runs on, as its users would have to.
if " avx512f" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")

import numpy as np  # noqa: E402

from fulgurite import _fulgurite  # noqa: E402
from fulgurite.cluster import DBSCAN, HDBSCAN, KMeans  # noqa: E402
from fulgurite.decomposition import PCA, TruncatedSVD  # noqa: E402
from fulgurite.neighbors import NearestNeighbors  # noqa: E402

THREADS = os.cpu_count()
KMEANS = dict(n=200_000, d=128, k=1024, steps=10)
KNN = dict(base=100_000, queries=20_000, d=128, k=10)


def race(rounds, contenders):
    """Seconds of each contender, taking turns, and what each returned last."""
    seconds, results = {name: [] for name in contenders}, {}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            results[name] = call()
            seconds[name].append(time.perf_counter() - start)
            time.sleep(0.2)  # nobody's idle threads spin into the next one's time
    return {name: statistics.median(s) for name, s in seconds.items()}, seconds, results


def product_rate():
    """GFLOP/s of a large f32 product: the best of NumPy's BLAS and our own micro-kernel on vectors."""
    a = np.random.default_rng(9).standard_normal((3072, 3072), dtype=np.float32)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        rates.append(2 * 3072**3 / (time.perf_counter() - start) / 1e9)
    return {"numpy": statistics.median(rates), "ours": statistics.median(_fulgurite.gemm_rate(THREADS) for _ in range(5))}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def squared(x, c):
    """Squared distances of rows to rows in float64."""
    return ((x.astype(np.float64) - c.astype(np.float64)) ** 2).sum(1)


def kmeans(rounds):
    import faiss
    from sklearn.cluster import KMeans as Theirs

    n, d, k, steps = KMEANS.values()
    x = normal(0, n, d)
    start = x[:k].copy()
    faiss.omp_set_num_threads(THREADS)

    def by_faiss():
        found = faiss.Kmeans(d, k, niter=steps, max_points_per_centroid=n)
        found.train(x, init_centroids=start)
        return found.centroids, found.index.search(x, 1)[1][:, 0]

    rate = product_rate()
    medians, seconds, results = race(
        rounds,
        {
            "ours": lambda: KMeans(k, init=start, max_iter=steps, tol=0.0).fit(x),
            "ours, bf16": lambda: KMeans(k, init=start, max_iter=steps, tol=0.0, score_tolerance=1 / 64).fit(x),
            "scikit-learn": lambda: Theirs(k, init=start, n_init=1, max_iter=steps, tol=0.0, algorithm="lloyd").fit(x),
            "faiss": by_faiss,
        },
    )
    rate_after = product_rate()
    product = max(max(rate.values()), max(rate_after.values()))
    ours, theirs = results["ours"], results["scikit-learn"]
    own = squared(x, ours.cluster_centers_[ours.labels_])
    # From scikit-learn's centroids, ours must give its labels, or equally near ones.
    theirs_by_ours = KMeans(k, init=theirs.cluster_centers_, max_iter=0).fit(x).labels_
    differ = np.flatnonzero(theirs_by_ours != theirs.labels_)
    gap = squared(x[differ], theirs.cluster_centers_[theirs.labels_[differ]]) - squared(
        x[differ], theirs.cluster_centers_[theirs_by_ours[differ]]
    )
    rate_of_ours = 2 * n * d * k * (steps + 1) / medians["ours"] / 1e9
    relative = abs(ours.inertia_ - float(theirs.inertia_)) / float(theirs.inertia_)
    return {
        "shape": KMEANS,
        "median_seconds": medians,
        "seconds": seconds,
        "over_scikit_learn": medians["scikit-learn"] / medians["ours"],
        "over_faiss": medians["faiss"] / medians["ours"],
        "gflops": rate_of_ours,
        "matrix_product_gflops": {"before": rate, "after": rate_after},
        "share_of_matrix_product": rate_of_ours / product,
        "inertia_relative_difference": relative,
        "inertia_of_float64": abs(own.sum() - ours.inertia_) / ours.inertia_,
        "labels_equal_to_scikit_learn_share": float((ours.labels_ == theirs.labels_).mean()),
        "labels_equal_to_faiss_share": float((ours.labels_ == results["faiss"][1]).mean()),
        "labels_from_its_centroids_that_differ": len(differ),
        "their_label_is_farther_by_at_most": float(gap.max(initial=0.0)),
        "bars": {
            "at least 2x scikit-learn": medians["scikit-learn"] / medians["ours"] >= 2,
            "at least 1.2x faiss": medians["faiss"] / medians["ours"] >= 1.2,
            "at least 75% of a matrix product": rate_of_ours / product >= 0.75,
            "inertia within 1e-5": relative <= 1e-5,
            "labels equal up to ties": bool((gap >= 0).all() and gap.max(initial=0.0) <= 1e-3),
        },
    }


def knn(rounds):
    import faiss
    from sklearn.neighbors import NearestNeighbors as Theirs

    n, m, d, k = KNN.values()
    base, queries = normal(1, n, d), normal(2, m, d)
    faiss.omp_set_num_threads(THREADS)

    def by_faiss():
        index = faiss.IndexFlatL2(d)
        index.add(base)
        return index.search(queries, k)[1]

    medians, seconds, results = race(
        rounds,
        {
            "ours": lambda: NearestNeighbors(n_neighbors=k).fit(base).kneighbors(queries),
            "ours, bf16": lambda: NearestNeighbors(n_neighbors=k, score_tolerance=1 / 64).fit(base).kneighbors(queries),
            "scikit-learn": lambda: Theirs(n_neighbors=k, algorithm="brute").fit(base).kneighbors(queries),
            "faiss": by_faiss,
        },
    )
    rows = results["ours"][1]
    # Truth in float64, for rows drawn at random.
    chosen = np.random.default_rng(5).choice(m, 300, replace=False)
    norms = (base.astype(np.float64) ** 2).sum(1)
    found = 0
    for q in chosen:
        truth = np.argpartition(norms - 2 * (base.astype(np.float64) @ queries[q].astype(np.float64)), k)[:k]
        found += len(set(truth) & set(rows[q]))
    recall = found / (300 * k)
    agree = lambda other: float(np.mean([len(set(a) & set(b)) for a, b in zip(rows, other)]) / k)
    return {
        "shape": KNN,
        "median_seconds": medians,
        "seconds": seconds,
        "over_scikit_learn": medians["scikit-learn"] / medians["ours"],
        "over_faiss": medians["faiss"] / medians["ours"],
        "recall_of_300_queries": recall,
        "recall_of_bf16": agree(results["ours, bf16"][1]),
        "share_of_neighbours_scikit_learn_has_too": agree(results["scikit-learn"][1]),
        "share_of_neighbours_faiss_has_too": agree(results["faiss"]),
        "bars": {
            "at least 2x scikit-learn": medians["scikit-learn"] / medians["ours"] >= 2,
            "at least 1.2x faiss": medians["faiss"] / medians["ours"] >= 1.2,
            "recall 1.0": recall == 1.0,
        },
    }


def hdbscan(rounds):
    import hdbscan as package
    from sklearn.datasets import make_blobs
    from sklearn.metrics import adjusted_rand_score

    x, _ = make_blobs(19_000, 32, centers=25, cluster_std=1.5, random_state=3)
    noise = np.random.default_rng(3).uniform(-12, 12, (1000, 32))
    x = np.ascontiguousarray(np.concatenate([x, noise]), np.float32)
    size = 15
    medians, seconds, results = race(
        rounds,
        {
            "ours": lambda: HDBSCAN(size).fit(x),
            "hdbscan": lambda: package.HDBSCAN(min_cluster_size=size, core_dist_n_jobs=THREADS).fit(x),
        },
    )
    ours, theirs = results["ours"], results["hdbscan"]
    exact = package.HDBSCAN(min_cluster_size=size, approx_min_span_tree=False, core_dist_n_jobs=THREADS).fit(x)
    ari = adjusted_rand_score(exact.labels_, ours.labels_)
    return {
        "shape": {"n": 20_000, "d": 32, "min_cluster_size": size},
        "median_seconds": medians,
        "seconds": seconds,
        "over_hdbscan": medians["hdbscan"] / medians["ours"],
        "adjusted_rand_index": ari,
        "adjusted_rand_index_with_its_approximate_tree": adjusted_rand_score(theirs.labels_, ours.labels_),
        "clusters": [int(ours.labels_.max() + 1), int(exact.labels_.max() + 1)],
        "noise": [int((ours.labels_ < 0).sum()), int((exact.labels_ < 0).sum())],
        "probabilities_differ_by_at_most": float(np.abs(ours.probabilities_ - exact.probabilities_).max()),
        "bars": {"at least 3x hdbscan": medians["hdbscan"] / medians["ours"] >= 3, "ARI 1.0": ari == 1.0},
    }


def svd(rounds):
    from sklearn.decomposition import TruncatedSVD as Theirs

    n, d, k = 200_000, 256, 32
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((d, d)))[0].astype(np.float32)
    x = (normal(4, n, d) * (0.97 ** np.arange(d, dtype=np.float32))) @ rotation
    wide = np.zeros((d, d))
    for part in np.array_split(x, 50):
        part = part.astype(np.float64)
        wide += part.T @ part
    truth = np.sqrt(np.linalg.eigvalsh(wide)[::-1][:k])
    error = lambda found: float(np.max(np.abs(found.singular_values_ - truth) / truth))
    medians, seconds, results = race(
        rounds,
        {
            "ours": lambda: TruncatedSVD(k).fit(x),
            "arpack": lambda: Theirs(k, algorithm="arpack").fit(x),
            "randomised": lambda: Theirs(k, algorithm="randomized", random_state=0).fit(x),
        },
    )
    errors = {name: error(found) for name, found in results.items()}
    return {
        "shape": {"n": n, "d": d, "k": k},
        "median_seconds": medians,
        "seconds": seconds,
        "largest_relative_error": errors,
        "over_arpack": medians["arpack"] / medians["ours"],
        "over_randomised": medians["randomised"] / medians["ours"],
        "bars": {
            "singular values within 1e-5": errors["ours"] <= 1e-5,
            "at least 2x arpack": medians["arpack"] / medians["ours"] >= 2,
            "at least 1.2x randomised, at its error or less": medians["randomised"] / medians["ours"] >= 1.2
            and errors["ours"] <= max(errors["randomised"], 1e-5),
        },
    }


def bits(rounds):
    """The same bits with 1, 2, 3 and 5 threads, for everything."""
    x, queries = normal(7, 30_000, 48), normal(8, 3_000, 48)

    def all_of(threads):
        found = KMeans(200, random_state=1, max_iter=5, n_threads=threads).fit(x)
        yield found.labels_, found.cluster_centers_, np.array(found.inertia_)
        yield NearestNeighbors(n_neighbors=9, n_threads=threads).fit(x).kneighbors(queries)
        found = HDBSCAN(10, n_threads=threads).fit(x[:6000])
        yield found.labels_, found.probabilities_
        yield (DBSCAN(7.0, n_threads=threads).fit(x[:6000]).labels_,)
        for kind in (PCA, TruncatedSVD):
            found = kind(10, n_threads=threads).fit(x)
            yield found.components_, found.singular_values_, found.transform(queries)

    flat = lambda threads: [a.tobytes() for group in all_of(threads) for a in group]
    one = flat(1)
    same = {str(threads): flat(threads) == one for threads in (2, 3, 5)}
    return {"equal_to_one_thread": same, "bars": {"same bits for any thread count": all(same.values())}}


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak(call):
    """Bytes that a call took at most beside what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def child(part, *rest):
    """One measurement in a process of its own."""
    out = subprocess.run(
        [sys.executable, __file__, "--child", part, *map(str, rest)], check=True, capture_output=True, text=True
    )
    return json.loads(out.stdout)


def memory_child():
    n, d, k, _ = KMEANS.values()
    x = normal(0, n, d)
    KMeans(4, init=x[:4], max_iter=1).fit(x[:1000])  # threads and code are there
    extra = peak(lambda: KMeans(k, init=x[:k].copy(), max_iter=3, tol=0.0).fit(x))
    return {"extra_bytes": extra, "input_bytes": x.nbytes, "distances_bytes": n * k * 4, "n_plus_kd": n + k * d}


def memory(rounds):
    found = child("memory")
    each = found["extra_bytes"] / found["n_plus_kd"]
    return {**found, "extra_bytes_for_each_of_n_plus_kd": each, "bars": {"inputs + O(N + K D): 64 bytes for each": each <= 64}}


def file_child(path, memory_bytes):
    KMeans(4, init="random", max_iter=1).fit(normal(0, 1000, 4))
    found = []
    fit = lambda: found.append(KMeans(64, init="random", random_state=1, max_iter=5, tol=0.0, memory_bytes=int(memory_bytes)).fit(path))
    extra = peak(fit)
    import hashlib

    digest = hashlib.sha256(found[0].labels_.tobytes() + found[0].cluster_centers_.tobytes()).hexdigest()
    return {"extra_bytes": extra, "digest": digest, "inertia": found[0].inertia_}


def cut_child(path, mapped):
    """Fits rows of a file that another thread cuts short meanwhile; tells how that ends, if it is there to tell."""
    import threading

    source = np.load(path, mmap_mode="r") if mapped == "mapped" else path
    threading.Timer(0.3, lambda: os.truncate(path, 1 << 20)).start()
    try:
        KMeans(64, init="random", max_iter=1000, tol=0.0, memory_bytes=48 << 20).fit(source)
    except ValueError as error:
        return str(error)


def file(rounds):
    import hashlib

    n, d, allowed = 1_500_000, 64, 48 << 20
    x = normal(11, n, d)
    asked = dict(init="random", random_state=1, max_iter=5, tol=0.0)

    def cold(path):
        """Drops the file from the page cache."""
        with open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return path

    with tempfile.TemporaryDirectory(dir=HERE.parent / "target") as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, x)
        with open(path, "rb+") as handle:
            os.fsync(handle.fileno())
        apart = child("file", path, allowed)
        size = path.stat().st_size
        read = lambda: KMeans(64, **asked, memory_bytes=allowed).fit(path)
        mapped = lambda: KMeans(64, **asked).fit(np.load(path, mmap_mode="r"))
        medians, seconds, results = race(
            rounds,
            {
                "read by position": read,
                "mapped": mapped,
                "in memory": lambda: KMeans(64, **asked).fit(x),
                "read by position, cold": lambda: (cold(path), read())[1],
                "mapped, cold": lambda: (cold(path), mapped())[1],
            },
        )
        labels = [found.labels_.tobytes() for found in results.values()]
        ends = {}
        for way in ("read", "mapped"):
            np.save(path, x)
            run = subprocess.run([sys.executable, __file__, "--child", "cut", str(path), way], capture_output=True, text=True)
            ends[way] = f"signal {-run.returncode}" if run.returncode < 0 else str(json.loads(run.stdout)).split(": ", 1)[1]
    fit = KMeans(64, **asked).fit(x)
    digest = hashlib.sha256(fit.labels_.tobytes() + fit.cluster_centers_.tobytes()).hexdigest()
    return {
        "file_bytes": size,
        "allowed_bytes": allowed,
        "extra_bytes": apart["extra_bytes"],
        "labels_bytes": n * 4,
        "median_seconds": medians,
        "seconds": seconds,
        "cut_short_meanwhile": ends,
        "bars": {
            "a file cut short is an error": ends["read"].startswith("changed while it was read"),
            "same labels read, mapped and in memory": len(set(labels)) == 1,
            "the file is larger than the memory allowed": size > allowed,
            "peak within what is allowed, labels and 16 MiB": apart["extra_bytes"] <= allowed + 2 * n * 4 + (16 << 20),
            "same labels and centroids as in memory": digest == apart["digest"],
        },
    }


PARTS = {"kmeans": kmeans, "knn": knn, "hdbscan": hdbscan, "svd": svd, "bits": bits, "memory": memory, "file": file}


def versions():
    from importlib.metadata import version

    names = ["numpy", "scipy", "scikit-learn", "faiss-cpu", "hdbscan"]
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "fulgurite": _fulgurite.__version__,
        "cpu": cpu,
        "threads": THREADS,
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE"),
        "engine": _fulgurite.explain("best")[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def main():
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps({"memory": memory_child, "file": file_child, "cut": cut_child}[sys.argv[2]](*sys.argv[3:])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    done, missed = {}, []
    for name in args.parts or PARTS:
        done[name] = {**PARTS[name](args.rounds), "versions": versions()}
        done[name]["bars"] = {bar: bool(kept) for bar, kept in done[name]["bars"].items()}
        shown = {key: value for key, value in done[name].items() if key not in ("versions", "seconds")}
        print(name, json.dumps(shown, indent=1), flush=True)
        missed += [f"{name}: {bar}" for bar, kept in done[name]["bars"].items() if not kept]
    if args.json:
        before = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**before, **done}, indent=1) + "\n")
    for bar in missed:
        print("missed:", bar)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
