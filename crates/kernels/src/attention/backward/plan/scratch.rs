//! Regions of the workspace.

use fulgurite_ptx::device::Span;

/// Alignment of a region, in bytes.
const ALIGN: u64 = 256;

/// Words at the beginning of the counters: tiles handed out, parts of the zero fill taken, parts zeroed, and whether some row
/// is marked.
const FIXED_WORDS: u64 = 4;
/// The last of these.
pub(crate) const SOME_MARKED: u64 = 3;

/// One value for each region: its size or offset in bytes, or its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scratch<T> {
    /// f32 sums of d_q.
    pub d_q_sums: T,
    /// -LSE in powers of two, f32, one for each padded row.
    pub shift: T,
    /// delta, f32, one for each padded row.
    pub delta: T,
    /// u32 words that are zero when the main kernel starts ([`CounterWords`]).
    pub counters: T,
    /// For each row of d_q, then of d_k and of d_v, the elements that are not finite.
    pub marks: T,
    /// Kind of each block of a block mask.
    pub block_table: T,
    /// Extremes of what a mask reads in each block, if the table is made from its expression.
    pub extremes: T,
    /// Steps that a block mask leaves to each key tile.
    pub step_ranges: T,
    /// Exact sums of auxiliary gradients.
    pub exact_words: T,
    /// f32 sums of d_k and d_v of split tiles.
    pub split_sums: T,
    /// f32 parts of d_k and d_v, if the query heads of a key/value head are spread over CTAs.
    pub head_parts: T,
}

impl<T> Scratch<T> {
    /// Applies a function to the regions, in memory order.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Scratch<U> {
        Scratch {
            d_q_sums: f(self.d_q_sums),
            shift: f(self.shift),
            delta: f(self.delta),
            counters: f(self.counters),
            marks: f(self.marks),
            block_table: f(self.block_table),
            extremes: f(self.extremes),
            step_ranges: f(self.step_ranges),
            exact_words: f(self.exact_words),
            split_sums: f(self.split_sums),
            head_parts: f(self.head_parts),
        }
    }
}

impl Scratch<u64> {
    /// Offsets of regions of these sizes, and the size of all of them.
    fn offsets(self) -> (Scratch<u64>, u64) {
        let mut end = 0;
        let offsets = self.map(|bytes| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        });
        (offsets, end)
    }

    /// Bytes of all regions of these sizes.
    pub fn bytes(self) -> u64 {
        self.offsets().1
    }

    /// Regions of these sizes in memory.
    pub fn at(self, memory: Span) -> Scratch<Span> {
        self.offsets().0.map(|at| memory.from(at))
    }
}

/// Offsets in the region of counters, in words of 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CounterWords {
    /// For each pair of head and sequence: tiles whose additions to d_q have arrived.
    pub added: u64,
    /// For each pair: parts of its d_q that are converted.
    pub rounded: u64,
    /// For each warpgroup of a split tile: steps in its sums.
    pub summed: u64,
    /// For each turn of deterministic mode: one more than the tile that added last.
    pub turns: u64,
    /// Words in all.
    pub count: u64,
}

impl CounterWords {
    /// The words of `pairs` whose d_q the main kernel converts, of `split_tiles`, and of `turns`.
    pub fn new(pairs: u64, split_tiles: u64, turns: u64) -> CounterWords {
        let added = FIXED_WORDS;
        let rounded = added + pairs;
        let summed = rounded + pairs;
        let first_turn = summed + 2 * split_tiles;
        CounterWords { added, rounded, summed, turns: first_turn, count: first_turn + turns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        let sizes = Scratch {
            d_q_sums: 1000,
            shift: 0,
            delta: 1,
            counters: 256,
            marks: 48,
            block_table: 4,
            extremes: 16,
            step_ranges: 8,
            exact_words: 0,
            split_sums: 300,
            head_parts: 257,
        };
        let at = sizes.at(Span::new(1 << 20, sizes.bytes()));
        let starts = [at.d_q_sums, at.shift, at.delta, at.counters, at.marks, at.block_table, at.extremes];
        let starts = [&starts[..], &[at.step_ranges, at.exact_words, at.split_sums, at.head_parts]].concat();
        let starts: Vec<u64> = starts.into_iter().map(|span| span.address() - (1 << 20)).collect();
        assert_eq!(starts, [0, 1024, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 2560, 3072]);
        assert_eq!(sizes.bytes(), 3584);
    }

    #[test]
    fn counters_do_not_overlap() {
        let words = CounterWords::new(3, 2, 7);
        assert_eq!(words, CounterWords { added: 4, rounded: 7, summed: 10, turns: 14, count: 21 });
        assert_eq!(CounterWords::new(0, 0, 0).count, FIXED_WORDS);
    }
}
