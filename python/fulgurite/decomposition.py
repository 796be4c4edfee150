"""PCA and truncated SVD with scikit-learn's names, on the CPU.

>>> from fulgurite.decomposition import PCA
>>> coordinates = PCA(2).fit_transform(points)
"""

from __future__ import annotations

from . import _fulgurite
from ._estimators import Estimator, rows_of, seed_of, threads_of

__all__ = ["PCA", "TruncatedSVD"]


class _Components(Estimator):
    _centred = False

    def fit(self, X, y=None):
        """Finds components: `components_`, `singular_values_`, `explained_variance_`, `explained_variance_ratio_`."""
        import numpy as np

        X = rows_of("X", X)
        k = self.n_components
        if not isinstance(k, (int, np.integer)) or not 1 <= k <= min(X.shape):
            raise ValueError(f"`n_components` is {k!r}, allowed: 1 to {min(X.shape)}, the lesser of rows and columns")
        self.components_ = np.empty((k, X.shape[1]), np.float32)
        self.mean_ = np.empty(X.shape[1], np.float32) if self._centred else None
        asked = (int(k), self.tol, seed_of(self.random_state), threads_of(self.n_threads))
        values, variances, ratios, randomised = _fulgurite.svd(X, asked, self.components_, self.mean_)
        self.singular_values_ = np.array(values)
        self.explained_variance_, self.explained_variance_ratio_ = np.array(variances), np.array(ratios)
        self.randomised_ = randomised
        self.n_components_, self.n_features_in_ = k, X.shape[1]
        self._sketch = None
        return self

    def partial_fit(self, X, y=None):
        """Finds components of all rows that `partial_fit` has had so far, from a sketch of them that it keeps, in f64.

        A call of `fit` starts anew. `tol` has no effect.
        """
        from .shards import components, merge_sketches, sketch

        own = sketch(X)
        found = own if getattr(self, "_sketch", None) is None else merge_sketches([self._sketch, own])
        values, vectors = components(found, self.n_components, centred=self._centred)
        self._sketch = found
        self.components_, self.singular_values_ = vectors, values
        self.mean_ = found.mean.astype("float32") if self._centred else None
        total = (found.centred**2).sum()
        self.explained_variance_ = values**2 / max(found.count - 1, 1)
        self.explained_variance_ratio_ = values**2 / total if total else values * 0
        self.randomised_ = False
        self.n_components_, self.n_features_in_ = self.n_components, len(found.mean)
        return self

    def transform(self, X):
        """Coordinates of rows along the components."""
        import numpy as np

        components = self._fitted("components_")
        X = rows_of("X", X)
        out = np.empty((len(X), len(components)), np.float32)
        _fulgurite.project(X, components, self.mean_, threads_of(self.n_threads), out)
        return out

    def fit_transform(self, X, y=None):
        """`fit`, then `transform`."""
        return self.fit(X).transform(X)

    def inverse_transform(self, X):
        """Reconstructs rows from coordinates."""
        rows = rows_of("X", X) @ self._fitted("components_")
        return rows if self.mean_ is None else rows + self.mean_


class TruncatedSVD(_Components):
    """Singular values and right singular vectors, largest first; the largest element of each vector is positive.

    `tol` allows relative errors of the singular values; the randomised form is then used if it is less work. None means
    exact up to float32 rounding. Explained variances are squared singular values divided by the number of rows minus
    one.
    """

    def __init__(self, n_components=2, *, tol=None, random_state=None, n_threads=None):
        self.n_components = n_components
        self.tol = tol
        self.random_state = random_state
        self.n_threads = n_threads


class PCA(_Components):
    """Principal components: the truncated SVD of the rows minus their mean, `mean_`."""

    _centred = True

    def __init__(self, n_components=2, *, tol=None, random_state=None, n_threads=None):
        self.n_components = n_components
        self.tol = tol
        self.random_state = random_state
        self.n_threads = n_threads
