"""Clusters, neighbours and components over shards: beside one array, with order-fixed merges, in threads and on Ray."""

import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fulgurite.cluster import KMeans
from fulgurite.decomposition import PCA, TruncatedSVD
from fulgurite.neighbors import NearestNeighbors
from fulgurite.shards import (
    assign_and_sum,
    components,
    kmeans,
    lists,
    merge_sketches,
    merge_sums,
    merge_topk,
    next_centroids,
    probed,
    search_lists,
    seeds,
    sketch,
    topk,
)

LONG = os.environ.get("FULGURITE_LONG") == "1"
RNG = np.random.default_rng(8)
POINTS = RNG.standard_normal((1500, 9)).astype(np.float32) + 3 * RNG.integers(0, 4, (1500, 1))
POINTS = POINTS.astype(np.float32)
# Shards of different sizes, one of them empty.
CUTS = [0, 400, 401, 401, 1100, 1500]
SHARDS = [POINTS[a:b] for a, b in zip(CUTS, CUTS[1:])]


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_a_step_over_shards(metric):
    centroids = POINTS[:12]
    whole = assign_and_sum(POINTS, centroids, metric=metric)
    parts = [assign_and_sum(x, centroids, metric=metric) for x in SHARDS]
    merged = merge_sums(parts)
    assert (merged.labels == whole.labels).all() and (merged.counts == whole.counts).all()
    assert whole.counts.sum() == 1500 and merged.sums.dtype == np.float64
    want = np.stack([POINTS[whole.labels == c].astype(np.float64).sum(0) for c in range(12)])
    for found in (whole, merged):
        np.testing.assert_allclose(found.sums, want, rtol=1e-13, atol=1e-10)
        np.testing.assert_allclose(found.inertia, whole.inertia, rtol=1e-13)
    model = KMeans(12, init=centroids, max_iter=1, tol=0.0, metric=metric).fit(POINTS)
    new, moved = next_centroids(centroids, whole, metric=metric)
    np.testing.assert_allclose(new, model.cluster_centers_, rtol=2e-7, atol=1e-6)
    assert moved > 0


def test_the_same_shards_give_the_same_bits_in_any_order_of_work():
    first = POINTS[::120]
    one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first)
    with ThreadPoolExecutor(3) as pool:
        many = kmeans(lambda c: pool.map(lambda x: pickle.loads(pickle.dumps(assign_and_sum(x, c))), SHARDS), first)
    assert one.centroids.tobytes() == many.centroids.tobytes() and one.inertia == many.inertia
    assert one.steps == many.steps > 1 and (one.labels == many.labels).all()
    # Lloyd's algorithm over one array ends near: sums have another order.
    whole = KMeans(len(first), init=first, tol=0.0).fit(POINTS)
    again = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first, tol=0.0)
    assert (again.labels == whole.labels_).all()
    np.testing.assert_allclose(again.centroids, whole.cluster_centers_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again.inertia, whole.inertia_, rtol=1e-6)


def test_parts_without_labels_take_the_same_steps():
    first = POINTS[::120]

    def bare(centroids):
        none = np.empty(0, np.int32)
        return [assign_and_sum(x, centroids)._replace(labels=none) for x in SHARDS]

    for tol in (0.0, 1e-4):
        one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first, tol=tol)
        two = kmeans(bare, first, tol=tol)
        assert one.centroids.tobytes() == two.centroids.tobytes() and one.inertia == two.inertia
        assert one[-1] == two[-1] > 2  # steps


def each_of(shards):
    return lambda function: [pickle.loads(pickle.dumps(function))(at, x) for at, x in enumerate(shards)]


def test_seeds_over_shards():
    blobs = [np.float32(50 * at) + RNG.standard_normal((120, 3)).astype(np.float32) for at in range(7)]
    rows = np.concatenate(blobs)[RNG.permutation(840)]
    parts = [rows[:10], rows[10:10], rows[10:500], rows[500:]]
    for state in range(5):
        found = seeds(each_of(parts), 7, random_state=state)
        assert sorted(np.round(found.mean(1) / 50)) == list(range(7))  # one in each blob
        assert found.tobytes() == seeds(each_of(parts), 7, random_state=state).tobytes()
    assert seeds(each_of(parts), 840).shape == (840, 3)
    same = [np.ones((4, 2), np.float32)] * 2
    assert (seeds(each_of(same), 3) == 1).all()
    for count in (0, 841):
        with pytest.raises(ValueError, match=f"`n_clusters` is {count}, allowed: 1 to 840, the number of rows"):
            seeds(each_of(parts), count)


def test_neighbours_over_shards():
    queries = POINTS[::70] + np.float32(0.25)
    rows = np.array(CUTS[:-1])
    parts = [topk(x, queries, 7, first_row=int(at)) for x, at in zip(SHARDS, rows)]
    distances, found = merge_topk(parts, 7)
    want, want_rows = NearestNeighbors(7).fit(POINTS).kneighbors(queries)
    assert (distances == want).all() and (found == want_rows).all()
    # Equal distances are ordered by row, over shards too.
    grid = np.repeat(np.arange(4, dtype=np.float32), 5)[:, None]
    parts = [topk(grid[a:b], grid[:3], 6, first_row=a) for a, b in ((11, 20), (0, 7), (7, 11))]
    distances, found = merge_topk(parts, 6)
    assert (found == np.arange(6)).all() and (distances[:, :5] == 0).all() and (distances[:, 5] == 1).all()


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_inverted_lists_over_shards(metric):
    queries, centroids = POINTS[::40] + np.float32(0.25), POINTS[:1500:100]
    labels = [assign_and_sum(x, centroids, metric=metric).labels for x in SHARDS]
    made = [lists(x, centroids, of, first_row=at, metric=metric) for x, of, at in zip(SHARDS, labels, CUTS)]
    want, want_rows = NearestNeighbors(7, metric=metric).fit(POINTS).kneighbors(queries)
    # All lists give the exact answer.
    distances, found = merge_topk([search_lists(x, queries, 7, n_probes=15) for x in made], 7)
    assert (distances == want).all() and (found == want_rows).all()
    # Fewer give the nearest rows of those lists, whatever the shards.
    distances, found = merge_topk([search_lists(x, queries, 7, n_probes=3) for x in made], 7)
    at = probed(centroids, queries, 3, metric=metric)
    of = np.concatenate(labels)
    for query, own, near, rows in zip(queries, at, distances, found):
        inside = np.flatnonzero(np.isin(of, own))
        best, order = NearestNeighbors(min(7, len(inside)), metric=metric).fit(POINTS[inside]).kneighbors(query[None])
        assert (rows[: len(inside)] == inside[order[0]]).all() and (near[: len(inside)] == best[0]).all()
    few = search_lists(made[1], queries, 3, n_probes=15)  # a shard of one row
    assert (few[1][:, 0] == 400).all() and (few[1][:, 1:] == -1).all() and np.isinf(few[0][:, 1:]).all()
    assert (search_lists(made[2], queries, 3)[1] == -1).all()
    for call, message in (
        (lambda: lists(POINTS, centroids, labels[0]), "`labels` is int32 [400], allowed: 1500 integers from 0 to 14"),
        (lambda: lists(POINTS[:2], centroids, [0, 15]), "`labels` is int64 [2], allowed: 2 integers from 0 to 14"),
        (lambda: search_lists(made[0], queries, 3, n_probes=16), "`n_probes` is 16, allowed: 1 to 15"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(message), error.value


def test_arrow_batches_of_partitions():
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from fulgurite.arrow import AssignArrow

    centroids = POINTS[:12]

    def batches(rows):
        for part in np.array_split(rows, 2):
            fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.ravel()), 9)
            column = fixed if len(part) % 2 else fixed.cast(pyarrow.list_(pyarrow.float32()))
            yield pyarrow.RecordBatch.from_arrays([column], ["x"])

    rows = [
        row
        for at, shard in reversed(list(enumerate(SHARDS)))
        for batch in AssignArrow(centroids, column="x", partition=at)(batches(shard))
        for row in batch.to_pylist()
    ]
    found = merge_sums(AssignArrow.parts(rows))
    halves = [[assign_and_sum(x, centroids) for x in np.array_split(shard, 2)] for shard in SHARDS]
    want = merge_sums(map(merge_sums, halves))
    assert found.sums.tobytes() == want.sums.tobytes() and (found.counts == want.counts).all()
    assert found.inertia == want.inertia
    wrong = pyarrow.RecordBatch.from_pydict({"x": [[1.0], [1.0, 2.0]], "s": ["a", "b"], "n": [[1.0], None]})
    for column, message in (
        ("y", "`column` is 'y', allowed: 'x', 's', 'n'"),
        ("x", "`x` has lists of 1 to 2 elements, allowed: one length"),
        ("s", "`s` is string, allowed: lists of numbers"),
        ("n", "`n` has 1 nulls, allowed: none"),
    ):
        with pytest.raises(ValueError) as error:
            list(AssignArrow(centroids, column=column)([wrong]))
        assert str(error.value).startswith(message), error.value


def test_dask_workers_give_the_bits_of_one_process():
    dask = pytest.importorskip("dask", reason="Dask is not installed")
    step = dask.delayed(assign_and_sum, pure=True)
    first = POINTS[::120]
    one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first)
    two = kmeans(lambda c: dask.compute(*[step(x, c) for x in SHARDS], scheduler="threads"), first)
    assert one.centroids.tobytes() == two.centroids.tobytes() and one.inertia == two.inertia


def test_spark_partitions_give_the_bits_of_one_process(tmp_path, monkeypatch):
    if not LONG:
        pytest.skip("starts Spark; FULGURITE_LONG=1 runs it")
    pytest.importorskip("pyspark", reason="Spark is not installed")
    import shutil

    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        pytest.skip("Spark needs Java, which is not installed")
    from pyspark.sql import SparkSession

    from fulgurite.arrow import AssignArrow

    path = os.path.dirname(os.path.dirname(__import__("fulgurite").__file__))
    # Workers are `python3` of PATH unless the environment says which; this one has the packages.
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    options = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": path,
        "spark.local.dir": str(tmp_path),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in options.items():
        builder = builder.config(name, value)
    started = time.perf_counter()
    spark = builder.getOrCreate()
    print(f"Spark started in {time.perf_counter() - started:.1f} s")
    try:
        rows = spark.sparkContext.parallelize([(x.tolist(),) for x in POINTS], 4)
        # Without the cache, each step would make the rows of Python objects again.
        frame = rows.toDF("x array<float>").cache()
        assert frame.count() == 1500
        print(f"rows there after {time.perf_counter() - started:.1f} s")
        first = POINTS[::120]

        def parts(centroids):
            found = frame.mapInArrow(AssignArrow(centroids, column="x"), AssignArrow.SCHEMA).collect()
            print(f"a step ended after {time.perf_counter() - started:.1f} s")
            return AssignArrow.parts(found)

        two = kmeans(parts, first)
        own = [POINTS[a:b] for a, b in zip(range(0, 1500, 375), range(375, 1501, 375))]
        one = kmeans(lambda c: [assign_and_sum(x, c) for x in own], first)
        assert one.centroids.tobytes() == two.centroids.tobytes() and one.inertia == two.inertia
    finally:
        spark.stop()


@pytest.mark.parametrize("estimator,centred", [(PCA, True), (TruncatedSVD, False)])
def test_components_over_shards(estimator, centred):
    merged = merge_sketches(map(sketch, SHARDS))
    values, vectors = components(merged, 4, centred=centred)
    want = estimator(4).fit(POINTS)
    np.testing.assert_allclose(values, want.singular_values_, rtol=1e-5)
    np.testing.assert_allclose(np.abs((vectors * want.components_).sum(1)), 1, atol=1e-5)
    assert merged.count == 1500
    np.testing.assert_allclose(merged.mean, POINTS.astype(np.float64).mean(0), rtol=1e-12)
    # Values that a Gram matrix would lose: it squares their ratio.
    small = np.diag([1.0, 1e-6]).astype(np.float32)
    values, _ = components(merge_sketches([sketch(small[:1]), sketch(small[1:])]), 2, centred=False)
    np.testing.assert_allclose(values, [1.0, 1e-6], rtol=1e-6)


def test_partial_fit():
    model = KMeans(6, random_state=0)
    for part in (POINTS[:500], POINTS[500:1000], POINTS[1000:]):
        assert model.partial_fit(part) is model
    assert model.n_iter_ == 3 and model.labels_.shape == (500,) and model.cluster_centers_.dtype == np.float32
    assert model._seen.counts.sum() == 1500
    start = KMeans(6, init=model.cluster_centers_, max_iter=0).fit(POINTS).inertia_
    assert start < 1.5 * KMeans(6, random_state=0).fit(POINTS).inertia_
    # The first step from given centroids is a step of Lloyd's algorithm, and `fit` starts anew.
    one = KMeans(5, init=POINTS[:5]).partial_fit(POINTS)
    np.testing.assert_allclose(
        one.cluster_centers_, KMeans(5, init=POINTS[:5], max_iter=1, tol=0.0).fit(POINTS).cluster_centers_, rtol=1e-6
    )
    assert one.fit(POINTS)._seen is None
    after = one.cluster_centers_.copy()
    one.partial_fit(POINTS[:10])
    assert np.abs(one.cluster_centers_ - after).max() < 0.05  # ten rows beside 1500 that were counted

    whole = PCA(3).fit(POINTS)
    parts = PCA(3).partial_fit(POINTS[:700]).partial_fit(POINTS[700:])
    for name in ("singular_values_", "explained_variance_", "explained_variance_ratio_", "mean_"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5)
    np.testing.assert_allclose(parts.transform(POINTS[:5]), whole.transform(POINTS[:5]), atol=1e-4)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: assign_and_sum(POINTS, POINTS[:3, :4]), "`X` has 9 columns, allowed: 4, those of `centroids`"),
        (lambda: assign_and_sum(POINTS[:0], POINTS[:3, :4]), "`X` has 9 columns, allowed: 4, those of `centroids`"),
        (lambda: assign_and_sum(POINTS, POINTS[:3], metric="l1"), "`metric` is \"l1\", allowed: 'euclidean'"),
        (lambda: assign_and_sum(POINTS[0], POINTS[:3]), "`X` has 1 axes, allowed: 2 (rows of elements)"),
        (lambda: merge_sums([]), "`parts` is empty, allowed: one or more"),
        (
            lambda: merge_sums([assign_and_sum(POINTS, POINTS[:3]), assign_and_sum(POINTS, POINTS[:4])]),
            "`parts` have sums (4, 9) and (3, 9), allowed: the same centroids",
        ),
        (lambda: kmeans(lambda c: [], POINTS[:3], tol=-1), "`tol` is -1, allowed: 0 or more"),
        (lambda: merge_topk([topk(POINTS[:3], POINTS[:2], 5)], 4), "`n_neighbors` is 4, allowed: 1 to 3, the rows of"),
        (lambda: merge_topk([(np.zeros((2, 3)), np.zeros((2, 2)))], 1), "`parts` have shapes (2, 3) and (2, 2)"),
        (lambda: components(sketch(POINTS[:3]), 4), "`n_components` is 4, allowed: 1 to 3, the lesser of rows and"),
        (lambda: merge_sketches([sketch(POINTS), sketch(POINTS[:, :2])]), "`parts` have 2 and 9 columns, allowed:"),
        (lambda: sketch([[np.inf]]), "`X` has elements that are not finite"),
        (lambda: KMeans(5).partial_fit(POINTS[:3]), "`clusters` is 5, allowed: 1 to 3"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message), error.value


@pytest.fixture(scope="module")
def ray():
    if not LONG:
        pytest.skip("starts a Ray cluster; FULGURITE_LONG=1 runs it")
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    path = os.pathsep.join([str(os.path.dirname(os.path.dirname(__import__("fulgurite").__file__)))])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()


def test_ray_actors_give_the_bits_of_one_process(ray, tmp_path):
    from fulgurite.ray import Shards

    sources = list(SHARDS)
    np.save(tmp_path / "rows.npy", SHARDS[3])
    sources[3], sources[0] = tmp_path / "rows.npy", ray.put(SHARDS[0])  # a file, and an object of Ray
    held = Shards(sources, actors=2)
    assert held.sizes == [400, 1, 0, 699, 400] and held.columns == 9
    first = POINTS[::120]
    one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first)
    two = held.kmeans(len(first), init=first)
    assert one.centroids.tobytes() == two.centroids.tobytes() and one.inertia == two.inertia
    assert (one.labels == two.labels).all()
    queries = POINTS[:30]
    for got, want in zip(held.kneighbors(queries, 6), NearestNeighbors(6).fit(POINTS).kneighbors(queries)):
        assert (got == want).all()
    made = held.ivf(9, random_state=1)
    for got, want in zip(made.kneighbors(queries, 6, n_probes=9), NearestNeighbors(6).fit(POINTS).kneighbors(queries)):
        assert (got == want).all()
    before = made.kneighbors(queries, 6, n_probes=2)
    ray.kill(held.actors[0], no_restart=False)
    assert all((a == b).all() for a, b in zip(before, made.kneighbors(queries, 6, n_probes=2)))
    merged = merge_sketches(map(sketch, SHARDS))
    for got, want in zip((*held.pca(3), *held.svd(3)), (*components(merged, 3), *components(merged, 3, centred=False))):
        assert got.tobytes() == want.tobytes()
    seeded = held.kmeans(8, random_state=3)
    start = seeds(each_of(SHARDS), 8, random_state=3)
    one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], start)
    assert one.centroids.tobytes() == seeded.centroids.tobytes() and seeded.labels.shape == (1500,)
    held.close()


def test_a_killed_actor_is_started_again(ray):
    from fulgurite.ray import Shards

    held = Shards(SHARDS, actors=2)
    first = POINTS[::120]
    killed = []

    def parts(centroids):
        # In the middle of the fit, an actor dies; Ray starts it again, and the result is the same.
        if len(killed) == 1:
            ray.kill(held.actors[1], no_restart=False)
        killed.append(None)
        return held._each("sums", centroids, "euclidean")

    one = kmeans(lambda c: [assign_and_sum(x, c) for x in SHARDS], first)
    two = kmeans(parts, first)
    assert len(killed) > 2 and one.centroids.tobytes() == two.centroids.tobytes() and one.inertia == two.inertia
    held.close()


def test_batches_of_a_ray_dataset(ray):
    pytest.importorskip("ray.data", reason="Ray has no Data here")
    from fulgurite.ray import AssignBatches, Shards

    rows = ray.data.from_items([{"data": x, "id": at} for at, x in enumerate(POINTS)], override_num_blocks=4)
    centroids = POINTS[:12]
    found = rows.map_batches(
        AssignBatches, fn_constructor_kwargs={"centroids": centroids, "order": "id"}, concurrency=2, batch_size=375
    )
    merged = AssignBatches.merge(found.take_all())
    want = merge_sums(assign_and_sum(x, centroids) for x in np.split(POINTS, 4))
    assert merged.sums.tobytes() == want.sums.tobytes() and (merged.counts == want.counts).all()
    held = Shards(ray.data.from_numpy(list(np.split(POINTS, 3))), actors=2)
    assert held.sizes == [500, 500, 500]
    held.close()
