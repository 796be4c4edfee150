//! Nearest neighbours against the plain f64 definition.

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Isa, Ivf, Metric, NeighborIndex, Options, Points, oracle};

fn random(rng: &mut Rng, n: usize, d: usize, center: f64) -> Vec<f32> {
    rng.normals(n * d, 1.0).iter().map(|x| (x + center) as f32).collect()
}

fn options(isa: Isa, threads: usize) -> Options {
    Options { isa: Some(isa), threads: Some(threads), rescale: None }
}

#[test]
fn rows_are_the_oracles_on_every_instruction_set() {
    let mut rng = Rng::new(31);
    for [n, m, d, k] in [[1, 1, 1, 1], [300, 40, 5, 7], [9000, 3, 8, 10], [150, 700, 33, 150], [2500, 30, 70, 9]] {
        for center in [0.0, 50.0] {
            for metric in Metric::ALL {
                let (base, asks) = (random(&mut rng, n, d, center), random(&mut rng, m, d, center));
                let (base, asks) = (Points::new(&base, [n, d]).unwrap(), Points::new(&asks, [m, d]).unwrap());
                let want = oracle::neighbors(metric, asks, base, k);
                let mut before = None;
                for isa in Isa::available() {
                    for threads in [1, 3] {
                        let index = NeighborIndex::new(base, metric, options(isa, threads)).unwrap();
                        let found = index.search(asks, k).unwrap();
                        for (q, want) in want.iter().enumerate() {
                            for (i, &(far, _)) in want.iter().enumerate() {
                                let row = found.of(q)[i] as usize;
                                let got = oracle::far(metric, asks.row(q), base.row(row));
                                assert!((got - far).abs() <= 1e-11 * far.abs().max(1.0), "{isa:?} {metric:?}");
                                let shown = if metric == Metric::Euclidean { far.sqrt() } else { far };
                                let told = f64::from(found.distances[q * k + i]);
                                assert!((told - shown).abs() <= 1e-6 * shown.abs().max(1.0));
                            }
                        }
                        assert!(before.is_none_or(|before| before == found), "bits differ: {isa:?} {threads}");
                        before = Some(found);
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_is_not_its_own_neighbour_and_the_first_of_equals_comes_first() {
    let data = [0.0, 1.0, 1.0, 1.0, 5.0];
    let points = Points::new(&data, [5, 1]).unwrap();
    let index = NeighborIndex::new(points, Metric::Euclidean, Options::default()).unwrap();
    let found = index.search_self(3).unwrap();
    assert_eq!(found.of(0), [1, 2, 3]);
    assert_eq!(found.of(2), [1, 3, 0]);
    assert_eq!(found.of(4), [1, 2, 3]);
    let all = index.search(points, 5).unwrap();
    assert_eq!(all.of(3), [1, 2, 3, 0, 4]);
}

/// Tight heaps in many dimensions: within the error of one bf16 there is the whole heap, so more digits are asked for.
#[test]
fn rows_that_crowd_are_the_oracles_too() {
    let (n, d, k) = (3000, 80, 4);
    let mut rng = Rng::new(14);
    let centres = random(&mut rng, 3, d, 0.0);
    let near = rng.normals(n * d, 1e-3);
    let data: Vec<f32> = (0..n * d).map(|i| centres[i / d % 3 * d + i % d] + near[i] as f32).collect();
    let points = Points::new(&data, [n, d]).unwrap();
    let asks = points.part(0, 50);
    let want: Vec<u32> = oracle::neighbors(Metric::Euclidean, asks, points, k).iter().flatten().map(|x| x.1).collect();
    for isa in Isa::available() {
        let index = NeighborIndex::new(points, Metric::Euclidean, options(isa, 2)).unwrap().into_owned().unwrap();
        for _ in 0..2 {
            assert_eq!(index.search(asks, k).unwrap().rows, want, "{isa:?}");
        }
    }
}

/// Twelve thousand rows that are all alike: every one is within any error, and lists must not grow with them.
#[test]
fn duplicates_only() {
    let (n, d) = (12_000, 66);
    let same = vec![0.7f32; n * d];
    let points = Points::new(&same, [n, d]).unwrap();
    for isa in Isa::available() {
        let index = NeighborIndex::new(points, Metric::Euclidean, options(isa, 2)).unwrap();
        let found = index.search(points.part(0, 3), 2).unwrap();
        assert_eq!((found.rows, found.distances), (vec![0, 1, 0, 1, 0, 1], vec![0.0; 6]), "{isa:?}");
    }
    let few = points.part(0, 40);
    let lists = Ivf::new(5).build(few).unwrap();
    assert_eq!(lists.search(few.part(7, 1), 3, 1).unwrap().rows, [0, 1, 2]);
    assert_eq!(lists.recall(few, 3, 5).unwrap(), 1.0);
}

/// Eight bits where the caller allows them: what is missed is worth little more than what is found, distances are true, and a
/// machine without a matrix unit loses nothing.
#[test]
fn a_tolerance_of_scores_keeps_its_promise() {
    let (n, m, d, k) = (4000, 60, 48, 8);
    let mut rng = Rng::new(77);
    for metric in Metric::ALL {
        let (base, asks) = (random(&mut rng, n, d, 0.3), random(&mut rng, m, d, 0.3));
        let (base, asks) = (Points::new(&base, [n, d]).unwrap(), Points::new(&asks, [m, d]).unwrap());
        let want = oracle::neighbors(metric, asks, base, k);
        let mean: Vec<f64> =
            (0..d).map(|c| (0..n).map(|i| f64::from(base.row(i)[c])).sum::<f64>() / n as f64).collect();
        let norm = |row: &[f32]| {
            let about =
                |(&x, &m): (&f32, &f64)| (f64::from(x) - if metric == Metric::Euclidean { m } else { 0.0 }).powi(2);
            row.iter().zip(&mean).map(about).sum::<f64>().sqrt()
        };
        let largest = (0..n).map(|i| norm(base.row(i))).fold(0.0, f64::max);
        for isa in Isa::available() {
            for (tolerance, least) in [(1.0 / 64.0, 0.9), (2f64.powi(-12), 0.999), (0.0, 1.0)] {
                let index = NeighborIndex::with_tolerance(base, metric, options(isa, 2), Some(tolerance)).unwrap();
                let found = index.search(asks, k).unwrap();
                let mut hits = 0;
                for (q, want) in want.iter().enumerate() {
                    // Twice the error of a score, in the units of the distance.
                    let slack = match metric {
                        Metric::Euclidean => 4.0 * tolerance * norm(asks.row(q)) * largest,
                        Metric::Dot => 2.0 * tolerance * norm(asks.row(q)) * largest,
                        _ => 2.0 * tolerance,
                    };
                    for (i, &(far, row)) in want.iter().enumerate() {
                        hits += usize::from(found.of(q).contains(&row));
                        let got = oracle::far(metric, asks.row(q), base.row(found.of(q)[i] as usize));
                        assert!(got <= far + slack + 1e-9, "{isa:?} {metric:?} {tolerance}: {got} for {far}");
                        let told = f64::from(found.distances[q * k + i]);
                        let shown = if metric == Metric::Euclidean { got.sqrt() } else { got };
                        assert!((told - shown).abs() <= 1e-6 * shown.abs().max(1.0));
                    }
                }
                let recall = hits as f64 / (m * k) as f64;
                assert!(
                    recall >= if isa == Isa::Amx { least } else { 1.0 },
                    "{isa:?} {metric:?} {tolerance}: {recall}"
                );
            }
        }
        let lists = Ivf::new(10).metric(metric).score_tolerance(Some(0.02)).build(base).unwrap();
        assert!(lists.recall(asks, k, 10).unwrap() >= 0.9);
    }
    for tolerance in [f64::NAN, -1.0] {
        let points = Points::new(&[1.0], [1, 1]).unwrap();
        let text = "`score_tolerance` is ";
        let exact = NeighborIndex::with_tolerance(points, Metric::Dot, Options::default(), Some(tolerance));
        assert!(exact.unwrap_err().to_string().starts_with(text));
        let lists = Ivf::new(1).score_tolerance(Some(tolerance)).build(points);
        assert!(lists.unwrap_err().to_string().starts_with(text));
    }
}

#[test]
fn extreme_sizes_of_numbers_are_no_trouble() {
    let mut rng = Rng::new(6);
    for scale in [1e-30f32, 1e-15, 1e18, 1e30] {
        let data: Vec<f32> = random(&mut rng, 300, 4, 1.0).iter().map(|x| x * scale).collect();
        let points = Points::new(&data, [300, 4]).unwrap();
        let index = NeighborIndex::new(points, Metric::Euclidean, Options::default()).unwrap();
        let want = oracle::neighbors(Metric::Euclidean, points, points, 3);
        let rows: Vec<u32> = want.iter().flatten().map(|x| x.1).collect();
        assert_eq!(index.search(points, 3).unwrap().rows, rows, "{scale}");
    }
}

#[test]
fn inverted_lists_find_more_with_more_probes_and_all_with_all() {
    let mut rng = Rng::new(9);
    let (base, asks) = (random(&mut rng, 2000, 12, 0.0), random(&mut rng, 60, 12, 0.0));
    let (base, asks) = (Points::new(&base, [2000, 12]).unwrap(), Points::new(&asks, [60, 12]).unwrap());
    for metric in Metric::ALL {
        let index = Ivf::new(20).metric(metric).seed(1).build(base).unwrap();
        let recalls: Vec<f64> = [1, 4, 20].iter().map(|&p| index.recall(asks, 10, p).unwrap()).collect();
        assert!(recalls[0] > 0.15 && recalls[1] > recalls[0] && recalls[2] == 1.0, "{metric:?} {recalls:?}");
    }
    // A row does not find itself, and all lists find what the exact search does.
    let index = Ivf::new(20).seed(1).build(base).unwrap().into_owned().unwrap();
    let exact = NeighborIndex::new(base, Metric::Euclidean, Options::default()).unwrap();
    assert_eq!(index.search_self(4, 20).unwrap(), exact.search_self(4).unwrap());
    let own = index.search_self(4, 2).unwrap();
    assert!((0..2000).all(|q| !own.of(q).contains(&(q as u32))));
    assert_eq!(
        index.search_self(2000, 1).unwrap_err().to_string(),
        "`k` is 2000, allowed: 1 to 1999; there are not more rows to find"
    );
    // More neighbours than a list holds.
    let index = Ivf::new(200).build(base).unwrap();
    let found = index.search(asks, 100, 1).unwrap();
    assert_eq!(found.rows.len(), 60 * 100);
}

#[test]
fn bad_calls_are_refused_by_name() {
    let points = Points::new(&[1.0, 2.0, 3.0], [3, 1]).unwrap();
    let index = NeighborIndex::new(points, Metric::Euclidean, Options::default()).unwrap();
    let text = |k| index.search(points, k).unwrap_err().to_string();
    assert_eq!(text(0), "`k` is 0, allowed: 1 to 3; at least one");
    assert_eq!(text(4), "`k` is 4, allowed: 1 to 3; there are not more rows to find");
    assert_eq!(
        index.search_self(3).unwrap_err().to_string(),
        "`k` is 3, allowed: 1 to 2; there are not more rows to find"
    );
    let wide = Points::new(&[1.0, 2.0], [1, 2]).unwrap();
    assert_eq!(
        index.search(wide, 1).unwrap_err().to_string(),
        "`queries` has rows of 2, allowed: 1, as the rows before; check the columns"
    );
    let lists = Ivf::new(4).build(points).unwrap_err().to_string();
    assert_eq!(lists, "`lists` is 4, allowed: 1 to 3; not more lists than rows");
    let ivf = Ivf::new(2).build(points).unwrap();
    assert_eq!(
        ivf.search(points, 1, 3).unwrap_err().to_string(),
        "`probes` is 3, allowed: 1 to 2; not more than lists"
    );
    let one = Points::new(&[1.0], [1, 1]).unwrap();
    let alone = NeighborIndex::new(one, Metric::Euclidean, Options::default()).unwrap();
    assert!(alone.search_self(1).is_err() && alone.search(one, 1).unwrap().rows == [0]);
}
