//! The kernel under construction: its parameters, its shared memory and its tensor memory.

use crate::attention::compute::Rings;
use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::features::Features;
use crate::attention::forward::load::{LoadParams, Loading};
use crate::attention::forward::params::ForwardParams;
use crate::attention::forward::tcgen05::config::TensorConfig;
use crate::attention::source::KeyBlockParams;
use crate::params::Params;
use crate::parts::mask::Spans;
use crate::parts::schedule::Shape;
use fulgurite_ptx::{Half, Mailbox, Pair, TensorRing, Tile, TileShape, Word};

/// Rows of a tile of accumulators.
const ROWS: u32 = 128;

/// The parameters.
pub(super) fn declared<'k, T: Half>(
    p: &Params<'k, ForwardCall>,
    features: &Features,
    config: &TensorConfig,
) -> ForwardParams<'k, T>
where
    Pair<T>: Word,
{
    let ([d, dv], cols) = (features.dims, config.cols);
    let shapes = [(ROWS, d), (cols, d), (cols, dv), (ROWS, config.part(dv))];
    ForwardParams::declare(p, features, cols, shapes.map(|(rows, cols)| TileShape::new(T::NUMBER, rows, cols)))
}

/// The kernel under construction.
pub(super) struct TensorKernel<'a, 'k, T> {
    pub features: &'a Features,
    pub config: TensorConfig,
    pub spans: Spans,
    pub params: ForwardParams<'k, T>,
    pub rings: Rings<'k>,
    /// Staging buffer for O: all rows of some columns.
    pub staging: Tile<'k>,
    /// Tiles that the loading thread announces to the other roles.
    pub announced: Mailbox<'k>,
    pub work_shape: Shape,
    /// Scores of each warpgroup, and over their last columns p. The warpgroup publishes p in parts.
    pub scores: TensorRing<'k>,
    /// Rows of o of each warpgroup.
    pub outputs: TensorRing<'k>,
}

impl<'a, 'k, T: Half> TensorKernel<'a, 'k, T>
where
    Pair<T>: Word,
{
    pub fn new(p: &Params<'k, ForwardCall>, features: &'a Features, config: TensorConfig) -> Self {
        let k = p.builder();
        let params = declared::<T>(p, features, &config);
        let spans = Spans::of(&features.mask);
        let [d, dv] = features.dims;
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let queries = k.pipe("q", 1, &vec![shape(ROWS, d); config.groups as usize]);
        let keys = k.pipe("k", config.depth, &[shape(config.cols, d)]);
        let values = k.pipe("v", config.depth, &[shape(config.cols, dv)]);
        let staging = k.tile("o", shape(config.rows(), config.part(dv)));
        let first = spans.bounded_left() && params.lists.is_none();
        let work_shape = Shape { tile: false, first, ragged: features.ragged.any() };
        let announced = k.mailbox("tiles", 2, work_shape.words());
        let parts = config.parts().len() as u32;
        let scores = k.tensor_ring_in_parts("scores", config.groups, config.cols, parts);
        let outputs = k.tensor_ring("outputs", config.groups, 1, dv);
        let rings = Rings { queries, keys, values };
        TensorKernel { features, config, spans, params, rings, staging, announced, work_shape, scores, outputs }
    }

    /// Where the key blocks come from.
    pub fn key_blocks(&self) -> KeyBlockParams<'_, 'k> {
        let (sequences, lists) = (&self.params.sequences, self.params.lists.as_ref());
        KeyBlockParams { spans: &self.spans, sequences, lists, cols: self.config.cols }
    }

    /// What the loading thread loads, and where.
    pub fn loading(&self) -> Loading<'_, 'k> {
        Loading {
            params: LoadParams::of(&self.params),
            announced: &self.announced,
            rings: &self.rings,
            spans: &self.spans,
            work_shape: self.work_shape,
            tiling: self.config.tiling(self.features),
            cols: self.config.cols,
            // The warps that need the tags do not wait for keys.
            tags_ride: false,
        }
    }
}
