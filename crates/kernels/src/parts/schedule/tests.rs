//! Tests of the tile order of equal sequences.

use super::{BandArgs, Equal};
use crate::params::{Params, Program};
use fulgurite_ptx::device::{Device, Span, Stream};
use fulgurite_ptx::{Target, Warpgroups};
use fulgurite_sim::{Options, Sim};

/// Batch, head and number of each tile, and the index computed from them.
struct Call {
    bands: BandArgs,
    heads: u32,
    found: Span,
}

fn build(p: &Params<'_, Call>) {
    let bands = Equal::declare(p, |call| &call.bands);
    let heads = p.divisor("heads", |call| call.heads);
    let found = p.array::<u32>("found", |call| call.found);
    p.builder().role("find", Warpgroups(1), |w| {
        let tile = w.cta();
        let [batch, head, number] = bands.find(heads, tile);
        let index = bands.index(heads.value(), [batch, head, number]);
        w.when(w.thread_in_group().eq(0), |w| {
            for (i, x) in [batch, head, number, index].into_iter().enumerate() {
                found.store(w, tile * 4 + i as u32, x);
            }
        });
    });
}

/// Each tile of every band is found once, and its index follows from its position.
#[test]
fn the_index_of_a_tile_follows_from_its_position() {
    let program = Program::build("tiles", Target::HOPPER, build).unwrap();
    for (tiles, batch, heads, order) in [(1, 1, 1, 1), (3, 2, 5, 4), (4, 3, 2, 6), (2, 7, 1, 3), (5, 1, 6, 1)] {
        let pairs = batch * heads;
        let last = if pairs % order == 0 { order } else { pairs % order };
        let sim = Sim::new(Options::default());
        let found = sim.allocate(16 * tiles * pairs).unwrap();
        let bands = BandArgs::new([tiles, pairs], [order, last]);
        let call = Call { bands, heads: heads as u32, found: found.span() };
        let launch = program.launch([(tiles * pairs) as u32, 1, 1], &call);
        let module = sim.load(launch.kernel.clone()).unwrap();
        sim.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
        let mut bytes = vec![0; (16 * tiles * pairs) as usize];
        sim.download(found.span(), &mut bytes).unwrap();
        let words: Vec<u32> = bytes.chunks(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        let mut seen: Vec<[u32; 3]> = Vec::new();
        for (tile, found) in words.chunks(4).enumerate() {
            assert_eq!(found[3], tile as u32, "{tiles} tiles, {batch} x {heads}, bands of {order}");
            seen.push([found[0], found[1], found[2]]);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len() as u64, tiles * pairs);
    }
}
