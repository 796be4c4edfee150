//! How warpgroups share the work of a tile: each schedule computes the same gradients with other owners of rows and columns.

pub(crate) mod bulk;
pub(crate) mod columns;
pub(crate) mod keys;
pub(crate) mod pairs;
