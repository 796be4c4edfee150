//! The compute roles of the main kernel.

use crate::attention::backward::Share;
use crate::attention::backward::schedules::{bulk, columns, keys, pairs};
use crate::attention::backward::state::Main;
use fulgurite_ptx::{Half, Pair, Warpgroups, Word};

/// Declares the compute roles of a kernel: those of the schedule by which its warpgroups share a tile.
pub(crate) fn declare<T: Half>(main: &Main<'_>)
where
    Pair<T>: Word,
{
    let (k, warpgroups) = (main.k, |count| Warpgroups(count).registers(main.config.registers[0]));
    match (main.config.share, &main.pair) {
        (_, Some(pair)) => {
            let between = pairs::Between::new(main, pair);
            k.role("values", warpgroups(1), |w| pairs::compute_values::<T>(w, &between));
            k.role("keys", warpgroups(1), |w| pairs::compute_keys::<T>(w, &between));
        }
        (Share::Keys, None) => k.role("compute", warpgroups(2), |w| match main.d_q.bulk {
            Some(_) => bulk::compute::<T>(w, main),
            None => keys::compute::<T>(w, main),
        }),
        (_, None) => k.role("compute", warpgroups(2), |w| columns::compute::<T>(w, main)),
    }
}
