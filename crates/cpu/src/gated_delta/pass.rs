//! Processes chunks one after the other, on the matrix unit if there is one, else on vectors.

use super::chunk::{ChunkData, Need, Shared};
use super::tiled::Tiled;
use super::{Context, Out, ValueHead};
use crate::memory::Arena;
use crate::simd::Ahead;
use fulgurite_core::gated_delta::Tokens;

/// The unit that computes the chunks.
pub(super) enum Pass<'w> {
    Vectors(Box<(Shared<'w>, ChunkData<'w>)>),
    Tiles(Box<Tiled<'w>>),
}

impl<'w> Pass<'w> {
    pub fn room(cx: &Context<'_>, width: usize) -> usize {
        match cx.matrix {
            Some(matrix) => Tiled::room(cx, matrix),
            None => Shared::room(cx) + ChunkData::room(cx, width),
        }
    }

    /// A pass for states of `width` columns.
    pub fn new(cx: &Context<'_>, arena: &mut Arena<'w>, width: usize) -> Self {
        match cx.matrix {
            Some(matrix) => Pass::Tiles(Box::new(Tiled::new(cx, matrix, arena, width))),
            None => Pass::Vectors(Box::new((Shared::new(cx, arena), ChunkData::new(cx, arena, width)))),
        }
    }

    /// The prefetch queue of the pass.
    pub fn ahead(&mut self) -> &mut Ahead {
        match self {
            Pass::Vectors(pass) => &mut pass.1.ahead,
            Pass::Tiles(tiled) => &mut tiled.ahead,
        }
    }

    /// Loads the keys of the tokens starting at `first`, and the queries if there will be outputs.
    pub fn load(&mut self, cx: &Context<'_>, s: &Tokens, key_head: usize, first: usize, outputs: bool) {
        match self {
            Pass::Vectors(pass) => {
                let (shared, work) = &mut **pass;
                shared.load(cx, s, key_head, first, Need::of(outputs), &mut work.ahead);
            }
            Pass::Tiles(tiled) => tiled.load(cx, s, key_head, first, outputs),
        }
    }

    /// Processes a chunk of a value head starting at `first`: `state` becomes the state after it, and `out` gets its
    /// outputs.
    pub fn chunk(
        &mut self,
        cx: &Context<'_>,
        at: &ValueHead<'_>,
        first: usize,
        state: &mut [f32],
        out: Option<&Out<'_>>,
    ) {
        match self {
            Pass::Vectors(pass) => {
                let (shared, work) = &mut **pass;
                work.chunk(cx, shared, at, first, state, Need::of(out.is_some()));
                if let Some(out) = out {
                    out.store_rows(cx, at, first, work.o, cx.vs);
                }
            }
            Pass::Tiles(tiled) => tiled.chunk(cx, at, first, state, out),
        }
    }
}
