"""Clusters, neighbours and components against float64 and, where they are installed, scikit-learn and hdbscan."""

import pickle

import numpy as np
import pytest

from fulgurite.cluster import DBSCAN, HDBSCAN, KMeans
from fulgurite.decomposition import PCA, TruncatedSVD
from fulgurite.neighbors import IVFNeighbors, NearestNeighbors


def blobs(n=400, d=6, centres=4, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, d)) + 25.0 * (np.arange(n) % centres)[:, None]).astype(np.float32)


def squared(a, b):
    return ((a[:, None].astype(np.float64) - b[None].astype(np.float64)) ** 2).sum(-1)


def test_kmeans_labels_are_the_nearest_centroids():
    x = np.random.default_rng(1).standard_normal((500, 9)).astype(np.float32)
    model = KMeans(20, random_state=3, max_iter=6).fit(x)
    far = squared(x, model.cluster_centers_)
    assert (model.labels_ == far.argmin(1)).all()
    assert model.inertia_ == pytest.approx(far.min(1).sum(), rel=1e-12)
    assert (model.predict(x) == model.labels_).all()
    np.testing.assert_allclose(model.transform(x), np.sqrt(far), rtol=1e-6)
    assert model.score(x) == pytest.approx(-model.inertia_)
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict(x) == model.labels_).all()


def test_kmeans_beside_scikit_learn():
    theirs = pytest.importorskip("sklearn.cluster").KMeans
    x = np.random.default_rng(2).standard_normal((3000, 16)).astype(np.float32)
    ours = KMeans(30, init=x[:30], max_iter=10, tol=0).fit(x)
    want = theirs(30, init=x[:30], n_init=1, max_iter=10, tol=0, algorithm="lloyd").fit(x)
    assert ours.inertia_ == pytest.approx(want.inertia_, rel=1e-5)
    assert (ours.labels_ == want.labels_).mean() > 0.999
    assert ours.n_iter_ == want.n_iter_


def test_kmeans_of_a_file_is_that_of_memory(tmp_path):
    x = np.random.default_rng(3).standard_normal((70_000, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    ours = KMeans(5, init="random", random_state=1, max_iter=4, memory_bytes=1 << 20)
    from_file = ours.fit(tmp_path / "x.npy").labels_.copy()
    assert (KMeans(5, init="random", random_state=1, max_iter=4).fit(x).labels_ == from_file).all()
    with pytest.raises(ValueError, match="check the path"):
        ours.fit(tmp_path / "nothing.npy")
    batches = KMeans(5, batch_size=1000, max_iter=30, random_state=0).fit(x)
    assert batches.labels_.shape == (70_000,)


def test_n_init_keeps_the_best():
    x = blobs(300, 3, 6, seed=4)
    one = [KMeans(6, init="random", random_state=seed).fit(x).inertia_ for seed in range(8)]
    assert KMeans(6, init="random", n_init=8, random_state=0).fit(x).inertia_ == min(one)


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_neighbours(metric):
    rng = np.random.default_rng(5)
    base, queries = (rng.standard_normal((n, 11)).astype(np.float32) for n in (300, 40))
    wide, asks = base.astype(np.float64), queries.astype(np.float64)
    far = {
        "euclidean": np.sqrt(squared(queries, base)),
        "dot": -asks @ wide.T,
        "cosine": 1 - asks @ wide.T / np.linalg.norm(asks, axis=1)[:, None] / np.linalg.norm(wide, axis=1)[None],
    }[metric]
    distances, rows = NearestNeighbors(n_neighbors=7, metric=metric).fit(base).kneighbors(queries)
    assert (rows == np.argsort(far, 1, kind="stable")[:, :7]).all()
    np.testing.assert_allclose(distances, np.sort(far, 1)[:, :7], rtol=1e-5, atol=1e-6)
    own = NearestNeighbors(n_neighbors=3, metric=metric).fit(base).kneighbors(return_distance=False)
    assert own.shape == (300, 3) and (own != np.arange(300)[:, None]).all()


def test_neighbours_beside_scikit_learn():
    theirs = pytest.importorskip("sklearn.neighbors").NearestNeighbors
    x = np.random.default_rng(6).standard_normal((500, 8)).astype(np.float32)
    want = theirs(n_neighbors=5, algorithm="brute").fit(x).kneighbors()
    got = NearestNeighbors(n_neighbors=5).fit(x).kneighbors()
    assert (got[1] == want[1]).mean() > 0.999
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_inverted_lists(metric):
    rng = np.random.default_rng(15)
    base, queries = (rng.standard_normal((n, 10)).astype(np.float32) for n in (2000, 50))
    lists = IVFNeighbors(n_neighbors=6, n_lists=20, metric=metric, random_state=3).fit(base)
    recalls = [lists.recall(queries, n_probes=probes) for probes in (1, 5, 20)]
    assert 0.1 < recalls[0] < recalls[1] < recalls[2] == 1.0
    exact = NearestNeighbors(n_neighbors=6, metric=metric).fit(base)
    want, got = exact.kneighbors(queries), lists.kneighbors(queries, n_probes=20)
    assert (got[1] == want[1]).all() and (got[0] == want[0]).all()
    some = lists.kneighbors(queries, return_distance=False)
    found = np.mean([len(set(a) & set(b)) for a, b in zip(some, want[1])]) / 6
    assert found == pytest.approx(lists.recall(queries))
    # Of each row the nearest others.
    own = lists.kneighbors(n_neighbors=2, n_probes=20, return_distance=False)
    assert (own == exact.kneighbors(n_neighbors=2, return_distance=False)).all()
    again = pickle.loads(pickle.dumps(lists))
    assert (again.kneighbors(queries)[1] == some).all()
    assert (lists.set_params(n_probes=20).kneighbors(queries)[1] == want[1]).all()


def test_inverted_lists_beside_scikit_learn():
    theirs = pytest.importorskip("sklearn.neighbors").NearestNeighbors
    x = blobs(3000, 12, 40, seed=16)
    want = theirs(n_neighbors=5, algorithm="brute").fit(x.astype(np.float64)).kneighbors(return_distance=False)
    got = IVFNeighbors(n_neighbors=5, n_lists=40, n_probes=8, random_state=0).fit(x).kneighbors(return_distance=False)
    assert np.mean([len(set(a) & set(b)) for a, b in zip(got, want)]) / 5 > 0.99


def test_an_index_follows_its_parameters_and_not_its_array():
    x = np.random.default_rng(17).standard_normal((300, 70)).astype(np.float32)
    model = NearestNeighbors(n_neighbors=3).fit(x)
    want = model.kneighbors(x[:5])[1]
    cosine = NearestNeighbors(n_neighbors=3, metric="cosine").fit(x).kneighbors(x[:5])[1]
    assert (model.set_params(metric="cosine").kneighbors(x[:5])[1] == cosine).all()
    assert (model.set_params(metric="euclidean").kneighbors(x[:5])[1] == want).all()
    about = model.set_params(score_tolerance=1 / 64).kneighbors(x[:5])
    far = np.sqrt(squared(x[:5], x))
    np.testing.assert_allclose(about[0], np.take_along_axis(far, about[1], 1), rtol=1e-5, atol=1e-6)


def test_rows_of_a_mapped_file(tmp_path):
    x = np.random.default_rng(18).standard_normal((5000, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    want = KMeans(7, random_state=1, max_iter=4).fit(x)
    for source in (mapped, tmp_path / "x.npy"):
        found = KMeans(7, random_state=1, max_iter=4).fit(source)
        assert (found.labels_ == want.labels_).all() and found.inertia_ == want.inertia_


def test_density_finds_blobs():
    x = np.concatenate([blobs(), np.full((1, 6), 500.0, np.float32)])
    for model in (HDBSCAN(10), DBSCAN(5.0)):
        labels = model.fit_predict(x)
        assert labels[-1] == -1 and set(labels[:-1]) - {-1} == {0, 1, 2, 3}
        for cluster in range(4):
            assert len(set(labels[cluster:-1:4]) - {-1}) == 1
    found = HDBSCAN(10).fit(x)
    assert ((found.probabilities_ > 0) == (found.labels_ >= 0)).all() and len(found.cluster_persistence_) == 4
    cores = DBSCAN(5.0).fit(x)
    assert (cores.components_ == x[cores.core_sample_indices_]).all()


def test_hdbscan_beside_hdbscan():
    package, metrics = pytest.importorskip("hdbscan"), pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(8)
    x = np.concatenate([blobs(900, 5, 6, seed=8), rng.uniform(0, 130, (60, 5))]).astype(np.float32)
    ours = HDBSCAN(12, min_samples=6).fit(x)
    want = package.HDBSCAN(min_cluster_size=12, min_samples=6, approx_min_span_tree=False).fit(x)
    assert metrics.adjusted_rand_score(ours.labels_, want.labels_) == 1.0
    np.testing.assert_allclose(ours.probabilities_, want.probabilities_, atol=1e-5)


def test_dbscan_beside_scikit_learn():
    theirs = pytest.importorskip("sklearn.cluster").DBSCAN
    x = np.concatenate([blobs(500, 3, 3, seed=9), np.random.default_rng(9).uniform(0, 60, (80, 3))]).astype(np.float32)
    for eps in (0.5, 1.0, 3.0):
        assert (DBSCAN(eps).fit_predict(x) == theirs(eps=eps).fit_predict(x.astype(np.float64))).all()


def test_components():
    rng = np.random.default_rng(10)
    x = (rng.standard_normal((800, 12)) * 0.7 ** np.arange(12) + 3.0).astype(np.float32)
    want = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    found = TruncatedSVD(5).fit(x)
    np.testing.assert_allclose(found.singular_values_, want[:5], rtol=1e-5)
    centred = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    u, s, v = np.linalg.svd(centred, full_matrices=False)
    pca = PCA(4).fit(x)
    np.testing.assert_allclose(pca.singular_values_, s[:4], rtol=1e-5)
    np.testing.assert_allclose(pca.explained_variance_ratio_, (s**2 / (s**2).sum())[:4], rtol=1e-4)
    signs = np.sign(v[np.arange(4), np.abs(v[:4]).argmax(1)])
    np.testing.assert_allclose(pca.components_, v[:4] * signs[:, None], atol=1e-4)
    np.testing.assert_allclose(pca.transform(x), centred @ pca.components_.T.astype(np.float64), atol=1e-4)
    whole = PCA(12).fit(x)
    np.testing.assert_allclose(whole.inverse_transform(whole.transform(x)), x, atol=1e-4)


def test_components_beside_scikit_learn():
    theirs = pytest.importorskip("sklearn.decomposition")
    x = np.random.default_rng(11).standard_normal((600, 20)).astype(np.float32)
    want = theirs.PCA(5, svd_solver="full").fit(x.astype(np.float64))
    got = PCA(5).fit(x)
    np.testing.assert_allclose(got.explained_variance_, want.explained_variance_, rtol=1e-5)
    np.testing.assert_allclose(np.abs(got.components_), np.abs(want.components_), atol=1e-4)


def test_threads_change_no_bits():
    x = np.random.default_rng(12).standard_normal((4000, 10)).astype(np.float32)
    fits = [KMeans(25, random_state=1, max_iter=5, n_threads=t).fit(x) for t in (1, 2, 3)]
    assert all((f.cluster_centers_ == fits[0].cluster_centers_).all() and f.inertia_ == fits[0].inertia_ for f in fits)


def test_rows_of_other_kinds_are_read():
    x = blobs(60, 4)
    want = KMeans(4, random_state=0).fit(x)
    strided = np.asfortranarray(np.repeat(x, 2, axis=0))[::2]
    for other in (x.astype(np.float64), strided, x.tolist(), x[:, ::-1][:, ::-1]):
        assert (KMeans(4, random_state=0).fit(other).labels_ == want.labels_).all()
    torch = pytest.importorskip("torch")
    assert (KMeans(4, random_state=0).fit(torch.from_numpy(x).requires_grad_()).labels_ == want.labels_).all()


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: KMeans(0).fit(x), "`clusters` is 0"),
        (lambda x: KMeans(999).fit(x), "`clusters` is 999, allowed: 1 to 60"),
        (lambda x: KMeans(2, metric="far").fit(x), "`metric` is \"far\""),
        (lambda x: KMeans(2, init="best").fit(x), "`init` is"),
        (lambda x: KMeans(2, init=x[:2, :2]).fit(x), "`init` has rows of 2, allowed: 4"),
        (lambda x: KMeans(2, n_init=0).fit(x), "`n_init` is 0"),
        (lambda x: KMeans(2, random_state=-1).fit(x), "`random_state` is -1"),
        (lambda x: KMeans(2, random_state="x").fit(x), "`random_state` is 'x'"),
        (lambda x: KMeans(2, tol=float("nan")).fit(x), "`tolerance` is NaN"),
        (lambda x: KMeans(2, batch_size=0).fit(x), "`batch` is 0"),
        (lambda x: KMeans(2).predict(x), "not fitted"),
        (lambda x: KMeans(2).fit(x).predict(x[:, :2]), "`X` has rows of 2, allowed: 4|rows of 2"),
        (lambda x: KMeans(2).fit(x[0]), "`X` has 1 axes"),
        (lambda x: KMeans(2).fit(x[:0]), "at least one row"),
        (lambda x: KMeans(2).fit(x[:, :0]), "at least one row and one column"),
        (lambda x: KMeans(2).fit(np.where(x == x[7, 2], np.nan, x)), "`X` row 7 column 2 is NaN"),
        (lambda x: KMeans(2).fit(x.astype(np.complex64)), "`X` is complex64"),
        (lambda x: KMeans(2).set_params(clusters=3), "`clusters` is no parameter of KMeans"),
        (lambda x: KMeans(2, metric="cosine").fit(x * 0), "has no angle"),
        (lambda x: NearestNeighbors(n_neighbors=61).fit(x).kneighbors(x), "`k` is 61, allowed: 1 to 60"),
        (lambda x: NearestNeighbors(n_neighbors=0).fit(x).kneighbors(x), "`k` is 0"),
        (lambda x: NearestNeighbors(n_neighbors=-1).fit(x).kneighbors(x), "`n_neighbors` is -1"),
        (lambda x: NearestNeighbors(n_neighbors=60).fit(x).kneighbors(), "`k` is 60, allowed: 1 to 59"),
        (lambda x: NearestNeighbors().kneighbors(x), "not fitted"),
        (lambda x: NearestNeighbors(n_neighbors=10**15).fit(x).kneighbors(x), "`k` is 1000000000000000, allowed: 1 to 60"),
        (lambda x: NearestNeighbors(n_neighbors=2.5).fit(x).kneighbors(x), "`n_neighbors` is 2.5, allowed: 1 to 60"),
        (lambda x: NearestNeighbors(score_tolerance=-1.0).fit(x), "`score_tolerance` is -1, allowed: 0 or more"),
        (lambda x: NearestNeighbors(metric="far").fit(x), "`metric` is \"far\""),
        (lambda x: IVFNeighbors(n_lists=61).fit(x), "`lists` is 61, allowed: 1 to 60"),
        (lambda x: IVFNeighbors(n_lists=0).fit(x), "`lists` is 0, allowed: 1 to 60"),
        (lambda x: IVFNeighbors(n_lists="x").fit(x), "`n_lists` is 'x', allowed: 1 to 60"),
        (lambda x: IVFNeighbors(n_lists=4, n_probes=5).fit(x).kneighbors(x), "`probes` is 5, allowed: 1 to 4"),
        (lambda x: IVFNeighbors(n_lists=4).fit(x).kneighbors(x, n_probes=0), "`probes` is 0, allowed: 1 to 4"),
        (lambda x: IVFNeighbors(n_neighbors=61).fit(x).kneighbors(x), "`k` is 61, allowed: 1 to 60"),
        (lambda x: IVFNeighbors().recall(x), "not fitted"),
        (lambda x: IVFNeighbors().fit(x).kneighbors(x[:, :2]), "rows of 2, allowed: 4"),
        (lambda x: HDBSCAN(1).fit(x), "`min_cluster_size` is 1"),
        (lambda x: HDBSCAN(5, 0).fit(x), "`min_samples` is 0"),
        (lambda x: DBSCAN(-1.0).fit(x), "`radius` is -1"),
        (lambda x: DBSCAN(1.0, min_samples=0).fit(x), "`min_samples` is 0"),
        (lambda x: PCA(5).fit(x), "`n_components` is 5, allowed: 1 to 4"),
        (lambda x: PCA(0.5).fit(x), "`n_components` is 0.5"),
        (lambda x: TruncatedSVD(2, tol=-1.0).fit(x), "`tolerance` is -1"),
        (lambda x: TruncatedSVD(2).transform(x), "not fitted"),
    ],
)
def test_wrong_calls_say_what_is_allowed(call, text):
    with pytest.raises(ValueError, match=text):
        call(blobs(60, 4))


def test_duplicates_only_and_one_point():
    same = np.ones((30, 2), np.float32)
    assert (KMeans(3, random_state=0).fit(same).labels_ == 0).all()
    assert HDBSCAN(5).fit(same).labels_.shape == (30,)
    one = np.ones((1, 2), np.float32)
    assert KMeans(1).fit(one).labels_.tolist() == [0]
    assert HDBSCAN(2).fit(one).labels_.tolist() == [-1]
    assert DBSCAN(1.0, min_samples=1).fit(one).labels_.tolist() == [0]
    assert NearestNeighbors(n_neighbors=2).fit(same).kneighbors(one)[1].tolist() == [[0, 1]]
    assert IVFNeighbors(n_neighbors=2).fit(same).kneighbors(one)[1].tolist() == [[0, 1]]
    assert IVFNeighbors(n_neighbors=1).fit(one).kneighbors(one)[1].tolist() == [[0]]


def test_parameters_have_names():
    model = KMeans(3, tol=0.5)
    assert model.get_params()["tol"] == 0.5 and repr(model) == "KMeans(n_clusters=3, tol=0.5)"
    assert model.set_params(n_clusters=4).n_clusters == 4
