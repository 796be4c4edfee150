//! Block masks from the mask of a problem, by interval arithmetic.

use crate::block::{BlockError, BlockMask, BlockSpec};
use crate::expr::{Coverage, Domain};
use crate::inputs::Bound;
use crate::stop;

impl BlockMask {
    /// The blocks that the mask of `bound`'s problem can reach, found by interval arithmetic without evaluating
    /// elements.
    pub fn from_mask(bound: &Bound<'_>, spec: BlockSpec) -> Result<BlockMask, BlockError> {
        spec.check()?;
        let problem = bound.problem();
        let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
        let (mut partial, mut full) = (Vec::new(), Vec::new());
        for b in 0..spec.batch {
            for h in 0..spec.heads {
                for i in 0..q_blocks {
                    stop::poll();
                    let (mut p, mut f) = (Vec::new(), Vec::new());
                    for j in 0..k_blocks {
                        match Self::coverage_of(bound, &spec, [b, h, i, j]) {
                            Coverage::Empty => {}
                            Coverage::Partial => p.push(j as i32),
                            Coverage::Full => f.push(j as i32),
                        }
                    }
                    partial.push(p);
                    full.push(f);
                }
            }
        }
        BlockMask::new(spec, [q_blocks, k_blocks], partial, full)
    }

    fn coverage_of(bound: &Bound<'_>, spec: &BlockSpec, [b, h, i, j]: [usize; 4]) -> Coverage {
        let problem = bound.problem();
        let heads = if spec.heads == 1 { 0..problem.q_heads() } else { h..h + 1 };
        let sequences = if spec.batch == 1 { bound.sequences() } else { &bound.sequences()[b..b + 1] };
        let (mut any, mut all) = (false, true);
        for s in sequences {
            let q = i * spec.rows..((i + 1) * spec.rows).min(s.q_len);
            let k = j * spec.cols..((j + 1) * spec.cols).min(s.k_len);
            if q.is_empty() || k.is_empty() {
                continue; // nothing there that could be seen or hidden
            }
            let coverage = problem.mask_program().map_or(Coverage::Full, |program| {
                program.coverage(&Domain {
                    batch: s.batch..s.batch + 1,
                    heads: heads.clone(),
                    q,
                    k,
                    q_len: (s.q_len, s.q_len),
                    k_len: (s.k_len, s.k_len),
                    aux: bound.aux(),
                })
            });
            any |= coverage != Coverage::Empty;
            all &= coverage == Coverage::Full;
        }
        match (any, all) {
            (false, _) => Coverage::Empty,
            (true, true) => Coverage::Full,
            (true, false) => Coverage::Partial,
        }
    }
}
