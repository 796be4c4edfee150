//! The forward kernel under construction: its parameters and its shared memory.

use crate::attention::compute::Rings;
use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::config::{End, ForwardConfig};
use crate::attention::forward::features::Features;
use crate::attention::forward::load::{LoadParams, Loading};
use crate::attention::forward::params::ForwardParams;
use crate::attention::forward::tiles::TileParams;
use crate::attention::forward::tiling::Tiling;
use crate::attention::source::{Interval, KeyBlockParams, KeySource, Nearest};
use crate::params::Params;
use crate::parts::mask::Spans;
use crate::parts::nonfinite::SpoiledTiles;
use crate::parts::row_sums::Added;
use crate::parts::schedule::{Shape, Work};
use fulgurite_core::Exp;
use fulgurite_ptx::{Group, Half, Mailbox, Pair, Scope, Tile, TileShape, Val, Word};

/// The configuration that the kernel actually gets, and the tiling.
pub(super) fn tiled(features: &Features, config: ForwardConfig) -> (ForwardConfig, Tiling) {
    let config = match features.exp {
        // SAS sees all scores of a tile before its first p, so tiles cannot be joined.
        Exp::Sas { .. } => ForwardConfig { end: End::Parts, ..config },
        _ => config,
    };
    (config, Tiling::new(features, &config))
}

/// Tiles in which q, k, v and o move.
pub(super) fn shapes<T: Half>(features: &Features, config: &ForwardConfig, tiling: &Tiling) -> [TileShape; 4] {
    let ([d, dv], cols) = ([features.dims[0], tiling.columns], config.cols);
    let shapes = [(64, d), (cols, d), (cols, dv), (64, config.parts(dv)[0])];
    shapes.map(|(rows, cols)| TileShape::new(T::NUMBER, rows, cols))
}

/// The kernel under construction: parameters and shared memory.
pub(super) struct ForwardKernel<'a, 'k, T> {
    pub features: &'a Features,
    pub config: ForwardConfig,
    pub tiling: Tiling,
    pub spans: Spans,
    pub params: ForwardParams<'k, T>,
    pub rings: Rings<'k>,
    /// Staging buffers for O: each holds all rows of some columns.
    pub staging: Vec<Tile<'k>>,
    /// A tile of ones next to v. The resulting column of p v is the row sum of p.
    pub ones: Option<Tile<'k>>,
    /// Tiles that the loading thread announces to the compute role.
    pub announced: Mailbox<'k>,
    pub work_shape: Shape,
    /// The tiles to compute again after the last one, if they are not computed again at once.
    pub spoiled: Option<SpoiledTiles<'k>>,
}

impl<'a, 'k, T: Half> ForwardKernel<'a, 'k, T>
where
    Pair<T>: Word,
{
    pub fn new(p: &Params<'k, ForwardCall>, features: &'a Features, config: ForwardConfig) -> Self {
        let k = p.builder();
        let (config, tiling) = tiled(features, config);
        let params = ForwardParams::declare(p, features, config.cols, shapes::<T>(features, &config, &tiling));
        let spans = Spans::of(&features.mask);
        let (d, dv) = (features.dims[0], tiling.columns);
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let queries = k.pipe("q", tiling.order.query_stages(), &vec![shape(64, d); tiling.q_tiles as usize]);
        let key_shape = [shape(config.cols, d)];
        let keys = match params.lists.is_some() || starts_nearest(features, &spans) {
            true => k.tagged_pipe("k", config.depth, &key_shape),
            false => k.pipe("k", config.depth, &key_shape),
        };
        let values = k.pipe("v", config.depth, &vec![shape(config.cols, dv); tiling.v_tiles as usize]);
        let [part, buffers] = config.parts(dv);
        let buffers = if features.results.is_f32() { 0 } else { buffers };
        let staging = (0..buffers).map(|_| k.tile("o", shape(config.rows(), part))).collect();
        let first = spans.bounded_left() && params.lists.is_none();
        // The other kernels have registers to compute a tile again at once.
        let later = params.nonfinite.is_some() && !features.wide() && !features.results.is_f32();
        let spoiled = later.then(|| SpoiledTiles::allocate(k, config.groups));
        // The index of a tile of equal sequences follows from its position.
        let ragged = features.ragged.any();
        let work_shape = Shape { first, ragged, tile: later && ragged };
        let ones = (config.added == Added::ByColumn).then(|| k.tile("ones", shape(config.cols, dv)));
        let announced = k.mailbox("tiles", 2, work_shape.words());
        let rings = Rings { queries, keys, values };
        ForwardKernel { features, config, tiling, spans, params, rings, staging, ones, announced, work_shape, spoiled }
    }

    /// The source of the kernel's keys.
    pub fn source(&self) -> Box<dyn KeySource<'k> + '_> {
        let (spans, sequences, cols) = (&self.spans, &self.params.sequences, self.config.cols);
        let lists = self.params.lists.as_ref();
        match lists.is_none() && starts_nearest(self.features, spans) {
            true => Box::new(Nearest { interval: Interval { spans, sequences, cols }, rows: self.tiling.rows }),
            false => KeyBlockParams { spans, sequences, lists, cols }.source(),
        }
    }

    /// Finds a tile by its index. A ragged batch is walked from its start, which is slow.
    pub fn find_tile(&self, w: &Scope<'k, Group>, index: Val<'k, u32>) -> Work<'k> {
        let params = &self.params;
        let (spans, sequences, lists) = (&self.spans, &params.sequences, params.lists.as_ref());
        let source = KeyBlockParams { spans, sequences, lists, cols: self.config.cols }.blocks::<Group>();
        let tiles = TileParams { sequences, bands: params.bands.as_ref(), heads: params.heads };
        let tiles = tiles.tiles::<Group>(w, self.tiling.rows, (!source.tagged()).then_some(spans));
        tiles.seek(w, index);
        tiles.find(w, index).work(w, self.tiling.rows, &*source)
    }

    /// The index of a tile, the inverse of [`find_tile`](Self::find_tile).
    pub fn index_of(&self, work: &Work<'k>) -> Val<'k, u32> {
        match (work.tile, &self.params.bands) {
            (Some(tile), _) => tile,
            (None, Some(bands)) => {
                bands.index(self.params.heads.value(), [work.batch, work.head, work.row / self.tiling.rows])
            }
            (None, None) => unreachable!("bug in fulgurite: a tile without its index"),
        }
    }

    /// What the loading thread loads, and where.
    pub fn loading(&self) -> Loading<'_, 'k> {
        Loading {
            params: LoadParams::of(&self.params),
            announced: &self.announced,
            rings: &self.rings,
            spans: &self.spans,
            work_shape: self.work_shape,
            tiling: self.tiling,
            cols: self.config.cols,
            tags_ride: true,
        }
    }
}

/// Whether tiles of equal sequences start with the keys nearest to their queries. Under a mask that ends at the diagonal, the
/// last keys are the nearest ones anyway.
fn starts_nearest(features: &Features, spans: &Spans) -> bool {
    let free = features.blocks.is_none() && !features.ragged.any() && !spans.bounded_right();
    free && features.modifiers.reads_distance()
}
