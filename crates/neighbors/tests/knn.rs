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
    for [n, m, d, k] in [[1, 1, 1, 1], [300, 40, 5, 7], [9000, 3, 8, 10], [150, 700, 33, 150]] {
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
