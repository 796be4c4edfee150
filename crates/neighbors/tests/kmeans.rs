//! k-means against the plain f64 definition.

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Error, Init, Isa, KMeans, KMeansModel, Metric, Options, Points, oracle};

fn random(rng: &mut Rng, n: usize, d: usize, center: f64) -> Vec<f32> {
    rng.normals(n * d, 1.0).iter().map(|x| (x + center) as f32).collect()
}

fn options(isa: Isa, threads: usize) -> Options {
    Options { isa: Some(isa), threads: Some(threads), rescale: None }
}

#[test]
fn labels_and_means_are_the_oracles_on_every_instruction_set() {
    let mut rng = Rng::new(11);
    for [n, d, k] in [[1, 1, 1], [50, 3, 7], [700, 17, 130], [300, 64, 5], [90, 130, 90]] {
        // Far from the origin: products about it would lose the digits that count.
        for center in [0.0, 100.0] {
            for metric in Metric::ALL {
                let data = random(&mut rng, n, d, center);
                let points = Points::new(&data, [n, d]).unwrap();
                let first = points.part(0, k);
                let mut all: Vec<(Vec<u32>, Vec<f32>, u64)> = Vec::new();
                for isa in Isa::available() {
                    for threads in [1, 2, 3] {
                        let kmeans = KMeans::new(k).metric(metric).init(Init::Given(first)).max_steps(3).tolerance(0.0);
                        let model = kmeans.options(options(isa, threads)).fit(points).unwrap();
                        let centroids = Points::new(model.centroids(), [k, d]).unwrap();
                        let want = oracle::labels(metric, points, centroids);
                        if metric == Metric::Euclidean {
                            assert_eq!(model.labels(), want, "{isa:?} {n} {d} {k} {metric:?}");
                        } else {
                            // Sums in another order may differ in the last digit of f64 and part equals.
                            for (i, (&got, &want)) in model.labels().iter().zip(&want).enumerate() {
                                let far = |c: u32| oracle::far(metric, points.row(i), centroids.row(c as usize));
                                assert!(far(got) - far(want) <= 1e-11, "{isa:?} {metric:?}: {got} for {want}");
                            }
                        }
                        assert_eq!(model.predict(points).unwrap(), model.labels());
                        all.push((model.labels().to_vec(), model.centroids().to_vec(), model.inertia().to_bits()));
                    }
                }
                assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "bits differ: {n} {d} {k} {metric:?}");
            }
        }
    }
}

#[test]
fn the_part_of_a_shard_is_the_step_of_its_points() {
    let mut rng = Rng::new(29);
    let (n, d, k) = (900, 11, 13);
    let data = random(&mut rng, n, d, 3.0);
    let points = Points::new(&data, [n, d]).unwrap();
    for metric in Metric::ALL {
        let first = points.part(5, k);
        let fit = KMeans::new(k).metric(metric).init(Init::Given(first)).max_steps(1).tolerance(0.0);
        let fitted = fit.fit(points).unwrap();
        let mut all = Vec::new();
        for threads in [1, 3] {
            let options = Options { threads: Some(threads), ..Options::default() };
            let model = KMeansModel::of(first, metric, options).unwrap();
            let part = model.assign_and_sum(points).unwrap();
            assert_eq!(part.labels, model.predict(points).unwrap());
            assert_eq!(part.inertia.to_bits(), model.inertia_of(points).unwrap().to_bits());
            assert_eq!(part.counts.iter().sum::<u64>(), n as u64);
            if metric != Metric::Cosine {
                // The centroids of the next step; a cluster without points keeps its own.
                for (c, (sum, &count)) in part.sums.chunks(d).zip(&part.counts).enumerate() {
                    let mean: Vec<f32> = sum.iter().map(|s| (s / count as f64) as f32).collect();
                    let want = if count == 0 { first.row(c) } else { &mean };
                    assert_eq!(&fitted.centroids()[c * d..(c + 1) * d], want, "{metric:?} {c}");
                }
            }
            all.push((part.labels, part.sums, part.counts));
        }
        assert_eq!(all[0], all[1]);
    }
    let model = KMeansModel::of(points.part(0, k), Metric::Euclidean, Options::default()).unwrap();
    let other = Points::new(&data[..20], [2, 10]).unwrap();
    assert!(matches!(model.assign_and_sum(other), Err(Error::Columns { .. })), "{:?}", model.assign_and_sum(other));
}

#[test]
fn a_step_takes_means_and_inertia_never_rises() {
    let mut rng = Rng::new(5);
    let (n, d, k) = (400, 9, 12);
    let data = random(&mut rng, n, d, 0.5);
    let points = Points::new(&data, [n, d]).unwrap();
    let mut before = f64::INFINITY;
    let mut centroids = points.part(0, k).data().to_vec();
    for _ in 0..6 {
        let old = Points::new(&centroids, [k, d]).unwrap();
        let labels = oracle::labels(Metric::Euclidean, points, old);
        let want = oracle::means(points, &labels, old);
        let model = KMeans::new(k).init(Init::Given(old)).max_steps(1).fit(points).unwrap();
        for (got, want) in model.centroids().iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() <= 1e-6, "{got} for {want}");
        }
        let new = Points::new(model.centroids(), [k, d]).unwrap();
        let inertia: f64 =
            (0..n).map(|i| oracle::far(Metric::Euclidean, points.row(i), new.row(model.labels()[i] as usize))).sum();
        assert!((inertia - model.inertia()).abs() <= 1e-9 * inertia);
        assert!(inertia <= before * (1.0 + 1e-6), "{inertia} after {before}");
        before = inertia;
        centroids = model.centroids().to_vec();
    }
}

#[test]
fn the_first_of_equals_wins_and_empty_clusters_stay() {
    // Centroid 1 is nearest to nothing; 0 and 2 are the same.
    let points = Points::new(&[0.0, 1.0, 2.0, 3.0], [4, 1]).unwrap();
    let first = Points::new(&[1.0, 50.0, 1.0], [3, 1]).unwrap();
    let model = KMeans::new(3).init(Init::Given(first)).max_steps(1).fit(points).unwrap();
    // 0 took all points and moved to 1.5; 2 stayed at 1.
    assert_eq!(model.centroids(), [1.5, 50.0, 1.0]);
    assert_eq!(model.labels(), [2, 2, 0, 0]);
}

#[test]
fn the_first_of_equals_wins_before_any_step() {
    let points = Points::new(&[0.0, 1.0, 2.0, 3.0], [4, 1]).unwrap();
    let first = Points::new(&[50.0, 1.0, 1.0], [3, 1]).unwrap();
    let model = KMeans::new(3).init(Init::Given(first)).max_steps(0).fit(points).unwrap();
    assert_eq!(model.labels(), [1, 1, 1, 1]);
    assert_eq!(model.steps(), 0);
    let step = KMeans::new(3).init(Init::Given(first)).max_steps(1).fit(points).unwrap();
    assert_eq!(step.centroids(), [50.0, 1.5, 1.0], "0 and 2 have no points and stay");
}

#[test]
fn order_of_the_data_changes_counts_of_no_cluster() {
    let mut rng = Rng::new(8);
    let (n, d, k) = (500, 6, 9);
    let data = random(&mut rng, n, d, 0.0);
    let points = Points::new(&data, [n, d]).unwrap();
    let reversed: Vec<f32> = data.chunks_exact(d).rev().flatten().copied().collect();
    let backwards = Points::new(&reversed, [n, d]).unwrap();
    let fit = |p| KMeans::new(k).init(Init::Given(points.part(0, k))).max_steps(5).tolerance(0.0).fit(p).unwrap();
    let (a, b) = (fit(points), fit(backwards));
    let turned: Vec<u32> = b.labels().iter().rev().copied().collect();
    assert_eq!(a.labels(), turned);
    for (x, y) in a.centroids().iter().zip(b.centroids()) {
        assert!((x - y).abs() <= 1e-5);
    }
}

#[test]
fn extreme_sizes_of_numbers_are_no_trouble() {
    let mut rng = Rng::new(2);
    for scale in [1e-30f32, 1e-12, 1.0, 1e15, 1e30] {
        let data: Vec<f32> = random(&mut rng, 200, 5, 3.0).iter().map(|x| x * scale).collect();
        let points = Points::new(&data, [200, 5]).unwrap();
        let model = KMeans::new(6).seed(1).max_steps(4).fit(points).unwrap();
        let centroids = Points::new(model.centroids(), [6, 5]).unwrap();
        assert_eq!(model.labels(), oracle::labels(Metric::Euclidean, points, centroids), "{scale}");
    }
}

#[test]
fn both_inits_separate_blobs_and_seeds_repeat() {
    let mut rng = Rng::new(21);
    let mut data = Vec::new();
    for i in 0..300 {
        let center = (i % 3) as f64 * 30.0;
        data.extend(rng.normals(4, 1.0).iter().map(|x| (x + center) as f32));
    }
    let points = Points::new(&data, [300, 4]).unwrap();
    let model = KMeans::new(3).seed(4).fit(points).unwrap();
    assert!((0..300).all(|i| model.labels()[i] == model.labels()[i % 3]));
    let again = KMeans::new(3).seed(4).fit(points).unwrap();
    assert_eq!(model.centroids(), again.centroids());
    let random = KMeans::new(3).seed(4).init(Init::Random).fit(points).unwrap();
    assert_eq!(random.labels().len(), 300);
    let far = model.transform(points).unwrap();
    for (i, row) in far.chunks_exact(3).enumerate() {
        let least = (0..3).min_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        assert_eq!(least as u32, model.labels()[i]);
    }
    assert!((model.inertia_of(points).unwrap() - model.inertia()).abs() <= 1e-9 * model.inertia());
}

#[test]
fn a_tolerance_of_scores_may_use_eight_bits() {
    let mut rng = Rng::new(3);
    let data = random(&mut rng, 600, 32, 0.0);
    let points = Points::new(&data, [600, 32]).unwrap();
    let fit =
        |t| KMeans::new(20).init(Init::Given(points.part(0, 20))).max_steps(0).score_tolerance(t).fit(points).unwrap();
    let (exact, loose) = (fit(None), fit(Some(0.02)));
    let same = exact.labels().iter().zip(loose.labels()).filter(|(a, b)| a == b).count();
    assert!(same > 500, "{same} of 600");
    assert!(loose.inertia() >= exact.inertia() && loose.inertia() <= exact.inertia() * 1.05);
}

#[test]
fn bad_calls_are_refused_by_name() {
    let points = Points::new(&[1.0, 2.0, 3.0], [3, 1]).unwrap();
    let text = |e: Result<_, Error>| e.map(|_: fulgurite_neighbors::KMeansModel| ()).unwrap_err().to_string();
    assert_eq!(text(KMeans::new(0).fit(points)), "`clusters` is 0, allowed: 1 to 3; at least one");
    assert_eq!(text(KMeans::new(4).fit(points)), "`clusters` is 4, allowed: 1 to 3; there are not more points");
    assert_eq!(
        text(KMeans::new(2).tolerance(f64::NAN).fit(points)),
        "`tolerance` is NaN, allowed: 0 or more; 0 runs until no label changes"
    );
    let wide = Points::new(&[1.0, 2.0], [1, 2]).unwrap();
    assert_eq!(
        text(KMeans::new(1).init(Init::Given(wide)).fit(points)),
        "`init` has rows of 2, allowed: 1, as the rows before; check the columns"
    );
    assert_eq!(
        text(KMeans::new(2).init(Init::Given(points)).fit(points)),
        "`init` is 3, allowed: 2 to 2; one row for each cluster"
    );
    let zeros = Points::new(&[1.0, 0.0], [2, 1]).unwrap();
    assert_eq!(
        text(KMeans::new(1).metric(Metric::Cosine).fit(zeros)),
        "`points` row 1 is all zeros and has no angle; drop it, or use the euclidean metric"
    );
    for (data, shape, want) in [
        (vec![], [0, 3], "`points` has shape [0, 3], allowed: at least one row and one column; give it rows"),
        (vec![], [3, 0], "`points` has shape [3, 0], allowed: at least one row and one column; give its rows elements"),
        (vec![1.0], [2, 1], "`points` has 1 elements, allowed: 2 rows of 1; check the shape"),
        (
            vec![1.0],
            [usize::MAX, 3],
            "`points` has 1 elements, allowed: 18446744073709551615 rows of 3; check the shape",
        ),
        (
            vec![1.0, f32::INFINITY],
            [2, 1],
            "`points` row 1 column 0 is inf, allowed: finite numbers; drop or fill such rows",
        ),
    ] {
        assert_eq!(Points::new(&data, shape).unwrap_err().to_string(), want);
    }
    assert!(KMeans::new(1).fit(points).unwrap().predict(wide).is_err());
}

#[test]
fn duplicates_only_and_one_point() {
    let same = [2.5f32; 40];
    let points = Points::new(&same, [20, 2]).unwrap();
    let model = KMeans::new(5).seed(2).fit(points).unwrap();
    assert!(model.labels().iter().all(|&label| label == 0) && model.inertia() == 0.0);
    let one = Points::new(&[1.0, 2.0], [1, 2]).unwrap();
    assert_eq!(KMeans::new(1).fit(one).unwrap().labels(), [0]);
}
