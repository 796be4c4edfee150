//! Properties of schedules, for random sizes and SM counts: every wait is for a lower number, every tile is dealt exactly
//! once, and memory is reused only when it is free. Planted wrong rules are found.

use crate::attention::backward::plan::BackwardPlan;
use crate::attention::backward::plan::bands::{BandInputs, Bands, RoundParts};
use crate::attention::backward::plan::deal::{Deal, Tiles};
use crate::attention::backward::{BackwardConfig, Order, prepare};
use fulgurite_core::{DType, Mask, Problem};
use proptest::prelude::*;

/// The pair and the tile in the pair of a number, as [`Equal::position`](crate::parts::schedule::Equal::position) finds them.
fn tile_at(bands: &Bands, number: u64) -> (u64, u64) {
    let before_last = (bands.pairs - bands.last) / bands.band;
    let band = (number / (bands.band * bands.tiles)).min(before_last);
    let pairs = if band < before_last { bands.band } else { bands.last.max(1) };
    let rest = number - band * bands.band * bands.tiles;
    (band * bands.band + rest % pairs, rest / pairs)
}

/// The numbers of each pair's tiles; an error if a tile is dealt twice or not at all.
fn numbers(bands: &Bands) -> Result<Vec<Vec<u64>>, String> {
    let mut found = vec![vec![None; bands.tiles as usize]; bands.pairs as usize];
    for number in 0..bands.all_tiles() {
        let (pair, nth) = tile_at(bands, number);
        let slot = found.get_mut(pair as usize).and_then(|tiles| tiles.get_mut(nth as usize));
        match slot {
            Some(slot @ None) => *slot = Some(number),
            Some(Some(other)) => return Err(format!("tile {nth} of pair {pair} is dealt as {other} and {number}")),
            None => return Err(format!("number {number} is tile {nth} of pair {pair}, which does not exist")),
        }
    }
    let all = |tiles: Vec<Option<u64>>| tiles.into_iter().collect::<Option<Vec<u64>>>();
    found.into_iter().map(|tiles| all(tiles).ok_or("a tile is not dealt".to_string())).collect()
}

/// Checks bands whose parts come with the first `with_parts` tiles.
fn check(bands: &Bands, parts: RoundParts, with_parts: u64) -> Result<(), String> {
    let numbers = numbers(bands)?;
    // In a fixed order, a tile waits for the one before it in its pair.
    if numbers.iter().any(|tiles| !tiles.is_sorted()) {
        return Err("a tile of a pair waits for a higher number".into());
    }
    if !bands.rounds {
        return Ok(());
    }
    // A run of steps has no part: its message names part 1 - lag, which must not exist.
    if bands.all_tiles() > 0 && bands.lag == 0 {
        return Err("parts come with their own tiles".into());
    }
    for (part, with) in (0..).zip(bands.lag..with_parts) {
        let (pair, _) = tile_at(bands, part);
        let last = numbers[pair as usize].iter().max().copied().unwrap_or(0);
        if last > with {
            return Err(format!("part {part} comes with tile {with} and waits for tile {last}"));
        }
    }
    for pair in bands.slots..bands.pairs {
        let first = numbers[pair as usize].iter().min().copied().unwrap_or(0);
        let owner = &numbers[(pair - bands.slots) as usize];
        for part in owner.iter().take(parts.count as usize) {
            let with = part + bands.lag;
            if with >= first || with >= with_parts {
                return Err(format!("tile {first} waits for part {part}, which comes with {with} of {with_parts}"));
            }
        }
    }
    Ok(())
}

/// Checks a deal: CTAs take works in the order of their numbers, and each work waits only for lower numbers.
fn check_deal(deal: &Deal, tiles: Tiles, ctas: u64, backwards: bool) -> Result<(), String> {
    let split = tiles.count - deal.whole;
    if !deal.whole.is_multiple_of(ctas) || deal.runs > ctas {
        return Err(format!("{} whole tiles and {} runs for {ctas} CTAs", deal.whole, deal.runs));
    }
    let mut summed = vec![0; split as usize];
    let mut end = 0;
    for run in 0..deal.runs {
        let steps = deal.steps_of(run);
        if steps.start != end || steps.is_empty() {
            return Err(format!("run {run} has steps {steps:?} after {end}"));
        }
        end = steps.end;
        let of_tile = |tile: u64| steps.start.max(tile * tiles.steps)..steps.end.min((tile + 1) * tiles.steps);
        let mut pieces: Vec<u64> = (steps.start / tiles.steps..=(steps.end - 1) / tiles.steps).collect();
        if pieces.len() > 2 {
            return Err(format!("run {run} has {} pieces", pieces.len()));
        }
        if backwards {
            pieces.reverse();
        }
        // Only the first piece of a run may be needed by a later run; only the last may wait for an earlier one.
        for (nth, &tile) in pieces.iter().enumerate() {
            let (steps, begin) = (of_tile(tile), tile * tiles.steps);
            if nth + 1 < pieces.len() && steps.start != begin {
                return Err(format!("piece {nth} of run {run} waits, and the piece after it is needed"));
            }
            let sum: &mut u64 = summed.get_mut(tile as usize).ok_or("a run goes past the last tile")?;
            if *sum != steps.start - begin {
                return Err(format!(
                    "run {run} waits for {} steps of tile {tile}, {sum} are summed",
                    steps.start - begin
                ));
            }
            *sum += steps.end - steps.start;
        }
    }
    match summed.iter().all(|steps| *steps == tiles.steps) && end == split * tiles.steps {
        true => Ok(()),
        false => Err("steps are missing".into()),
    }
}

/// Numbers that a configuration may give.
fn config([pairs, last, sums, zeroed]: [Option<u32>; 4]) -> BackwardConfig {
    BackwardConfig { pairs, last, sums, zeroed, ..BackwardConfig::hopper(128) }
}

prop_compose! {
    fn tilings()(
        pairs in 1u64..160,
        tiles in 1u64..40,
        masked: bool,
        fixed: bool,
        rounds: bool,
        pair_bytes in 1u64..1 << 26,
        wide: bool,
        multiprocessors in 1u64..200,
    ) -> BandInputs {
        let order = if fixed { Order::Fixed } else { Order::Any };
        BandInputs { pairs, tiles, masked, order, rounds, pair_bytes, wide, multiprocessors }
    }
}

fn given() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![2 => Just(None), 1 => (1u32..200).prop_map(Some)]
}

proptest! {
    #[test]
    fn every_wait_is_for_a_lower_number(
        tiling in tilings(),
        numbers in [given(), given(), given(), given()],
        steps in 1u64..300,
    ) {
        let bands = Bands::new(&tiling, &config(numbers));
        let parts = RoundParts::new(steps, tiling.tiles);
        prop_assert_eq!(check(&bands, parts, bands.all_tiles()), Ok(()), "{:?}", bands);
        prop_assert!(parts.count <= tiling.tiles && parts.count * parts.steps >= steps);
        prop_assert!((parts.count - 1) * parts.steps < steps);
    }

    #[test]
    fn no_first_tile_waits_for_zeros(tiling in tilings(), numbers in [given(), given(), given()]) {
        let [pairs, last, sums] = numbers;
        let bands = Bands::new(&tiling, &config([pairs, last, sums, None]));
        for number in 0..tiling.multiprocessors.min(bands.all_tiles()) {
            prop_assert!(tile_at(&bands, number).0 < bands.zeroed, "tile {} of {:?}", number, bands);
        }
    }

    #[test]
    fn split_tiles_are_dealt_once_and_wait_for_lower_numbers(
        count in 1u64..600,
        steps in 1u64..100,
        group in 1u64..9,
        join in 0u64..5,
        ctas in 1u64..200,
    ) {
        let tiles = Tiles { count, steps, group, join };
        if let Some(deal) = Deal::best(tiles, ctas) {
            prop_assert_eq!(check_deal(&deal, tiles, ctas, true), Ok(()), "{:?} {:?}", deal, tiles);
        }
    }

    /// With both services, parts come with whole tiles only.
    #[test]
    fn splitting_leaves_rounding_free_of_circles(
        tiling in tilings(),
        sums in given(),
        steps in 1u64..100,
        ctas in 1u64..200,
    ) {
        let tiling = BandInputs { masked: false, order: Order::Any, rounds: true, ..tiling };
        let bands = Bands::new(&tiling, &config([None, None, sums, None]));
        let tiles = Tiles { count: bands.all_tiles(), steps, group: 1, join: 0 };
        let deal = Deal::best(tiles, ctas).filter(|deal| bands.slots_come_free(deal.whole));
        if let Some(deal) = deal {
            prop_assert_eq!(check(&bands, RoundParts::new(steps, tiling.tiles), deal.whole), Ok(()), "{:?} {:?}", deal, bands);
        }
    }

    /// The prepare kernel zeroes one counter with each thread, and the sums that the zero fill does not.
    #[test]
    fn the_prepare_kernel_reaches_every_counter(
        [batch, q_len, k_len] in [1usize..9, 1usize..3000, 1usize..3000],
        [kv_heads, group] in [1usize..9, 1usize..5],
        head_dim in prop_oneof![Just(64usize), Just(128), Just(192), Just(256)],
        causal: bool,
        fixed: bool,
    ) {
        let mask = if causal { Mask::causal() } else { Mask::none() };
        let problem = Problem::builder()
            .dense(batch, q_len, k_len)
            .heads(kv_heads * group, kv_heads)
            .head_dim(head_dim)
            .dtype(DType::Bf16)
            .mask(mask)
            .build()
            .unwrap();
        let order = if fixed { Order::Fixed } else { Order::Any };
        let plan = BackwardPlan::new(&problem, false, order).unwrap();
        let threads = 32 * plan.schedule.rows.div_ceil(u64::from(prepare::ROWS));
        prop_assert!(plan.schedule.counters(order).count <= threads);
        prop_assert!(plan.schedule.zeroed_rows() <= plan.schedule.sum_rows());
        let uneven = !plan.schedule.spread.group.is_multiple_of(plan.schedule.spread.parts);
        prop_assert!(plan.schedule.sum_rows() <= plan.schedule.rows || uneven);
    }
}

/// Bands of sizes that use slots again, by the rules.
fn usual_bands() -> Vec<(Bands, RoundParts)> {
    let mut all = Vec::new();
    for masked in [false, true] {
        for (pairs, tiles, multiprocessors) in [(64, 8, 8), (100, 3, 10), (37, 16, 20), (128, 2, 16), (90, 5, 4)] {
            let (order, rounds, wide) = (Order::Any, true, false);
            let tiling = BandInputs { pairs, tiles, masked, order, rounds, pair_bytes: 1, wide, multiprocessors };
            all.push((Bands::new(&tiling, &config([None; 4])), RoundParts::new(24, tiles)));
        }
    }
    all
}

/// Asserts that the rules hold, and that a change of them is found in some of the usual bands.
#[track_caller]
fn planted(change: impl Fn(&Bands) -> Bands) {
    let mut found = 0;
    for (bands, parts) in usual_bands() {
        assert!(bands.slots < bands.pairs, "no slot is used again: {bands:?}");
        assert_eq!(check(&bands, parts, bands.all_tiles()), Ok(()), "{bands:?}");
        let wrong = change(&bands);
        found += usize::from(check(&wrong, parts, wrong.all_tiles()).is_err());
    }
    assert!(found > 0, "the wrong rule is not found");
}

#[test]
fn a_lag_that_is_too_short_is_found() {
    // The last tile of a band is handed out after the part that waits for it.
    planted(|bands| Bands { lag: (bands.band * (bands.tiles - 1)).saturating_sub(1), ..*bands });
    planted(|bands| Bands { lag: 0, ..*bands });
}

#[test]
fn a_lag_that_is_too_long_is_found() {
    planted(|bands| Bands { lag: bands.slots * bands.tiles, ..*bands });
    planted(|bands| Bands { lag: bands.lag + bands.slots * bands.tiles / 2, ..*bands });
}

#[test]
fn too_few_slots_are_found() {
    planted(|bands| Bands { slots: bands.slots / 2, ..*bands });
    planted(|bands| Bands { slots: bands.band, ..*bands });
}

#[test]
fn a_last_band_that_is_too_long_is_found() {
    planted(|bands| Bands { last: bands.last + (bands.pairs - bands.last) / bands.band * bands.band, ..*bands });
}

#[test]
fn tiles_that_are_dealt_twice_or_never_are_found() {
    // The last band must begin where the bands before it end.
    planted(|bands| Bands { last: bands.last - 1, ..*bands });
    planted(|bands| Bands { band: bands.band + 1, ..*bands });
}

#[test]
fn parts_that_come_with_runs_are_found() {
    let mut found = 0;
    for (bands, parts) in usual_bands() {
        let whole = (0..bands.all_tiles()).filter(|whole| !bands.slots_come_free(*whole));
        found += whole.filter(|whole| check(&bands, parts, *whole).is_err()).count();
    }
    assert!(found > 0, "the rule of slots that come free refuses nothing that is wrong");
}

#[test]
fn wrong_deals_are_found() {
    let tiles = Tiles { count: 10, steps: 13, group: 1, join: 0 };
    let deal = Deal::best(tiles, 7).expect("three tiles are left for seven CTAs");
    assert_eq!(check_deal(&deal, tiles, 7, true), Ok(()));
    // A run that goes forwards through its tiles waits before it does the piece that others wait for.
    assert!(check_deal(&deal, tiles, 7, false).is_err(), "{deal:?}");
    let wrong = [
        Deal { run: deal.run + 1, ..deal },
        Deal { longer: deal.longer + 1, ..deal },
        Deal { runs: deal.runs - 1, ..deal },
        Deal { whole: deal.whole + 1, ..deal },
        Deal { whole: deal.whole - 1, ..deal },
        // Runs of three pieces.
        Deal { whole: 7, runs: 1, run: 39, longer: 0 },
        Deal { whole: 0, runs: 7, run: 18, longer: 4 },
    ];
    for deal in wrong {
        assert!(check_deal(&deal, tiles, 7, true).is_err(), "{deal:?}");
    }
}
