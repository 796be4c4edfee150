//! HDBSCAN and DBSCAN against plain definitions.

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Dbscan, Hdbscan, Isa, Metric, Options, Points, oracle};

/// Blobs of points about centres 20 apart, and some noise between them.
fn blobs(rng: &mut Rng, n: usize, d: usize, centres: usize, noise: usize) -> Vec<f32> {
    let mut data = Vec::new();
    for i in 0..n {
        let centre = (i % centres) as f64 * 20.0;
        data.extend(rng.normals(d, 1.0).iter().map(|x| (x + centre) as f32));
    }
    for _ in 0..noise * d {
        data.push((rng.uniform() * 20.0 * centres as f64) as f32);
    }
    data
}

#[test]
fn the_tree_weighs_what_prims_does() {
    let mut rng = Rng::new(12);
    for [n, d, samples] in [[2, 1, 1], [30, 2, 3], [500, 7, 5], [300, 33, 10]] {
        let data: Vec<f32> = rng.normals(n * d, 1.0).iter().map(|&x| (x + 5.0) as f32).collect();
        let points = Points::new(&data, [n, d]).unwrap();
        let (cores, want) = oracle::spanning_tree(points, samples + 1);
        let mut before = None;
        for isa in Isa::available() {
            for threads in [1, 3] {
                let options = Options { isa: Some(isa), threads: Some(threads), rescale: None };
                let found = Hdbscan::new(5).min_samples(samples).options(options).fit(points).unwrap();
                let got: f64 = found.tree.iter().map(|edge| edge.weight).sum();
                assert_eq!(found.tree.len(), n - 1);
                assert!((got - want).abs() <= 1e-6 * want, "{isa:?} {n} {d}: {got} for {want}");
                for (got, want) in found.core_distances.iter().zip(&cores) {
                    assert!((f64::from(*got) - want).abs() <= 1e-6 * want);
                }
                for edge in &found.tree {
                    let (a, b) = (edge.ends.0 as usize, edge.ends.1 as usize);
                    let away = oracle::far(Metric::Euclidean, points.row(a), points.row(b)).sqrt();
                    assert!((edge.weight - away.max(cores[a]).max(cores[b])).abs() <= 1e-9 * edge.weight);
                }
                if before.as_ref().is_some_and(|(other, _)| *other == isa) {
                    assert!(before.as_ref().is_some_and(|(_, other)| *other == found), "threads change bits");
                }
                before = Some((isa, found));
            }
        }
    }
}

#[test]
fn separated_blobs_are_clusters_and_what_lies_between_is_noise() {
    let mut rng = Rng::new(3);
    let data = blobs(&mut rng, 600, 4, 6, 20);
    let points = Points::new(&data, [620, 4]).unwrap();
    let found = Hdbscan::new(15).fit(points).unwrap();
    for i in 0..600 {
        let same = found.labels[i] == found.labels[i % 6] || found.labels[i] == -1;
        assert!(same, "point {i}: {}", found.labels[i]);
    }
    assert_eq!(found.stabilities.len(), 6);
    assert!(found.labels[..600].iter().filter(|&&l| l >= 0).count() > 560);
    assert!(found.labels[600..].iter().filter(|&&l| l < 0).count() > 15);
    for (label, p) in found.labels.iter().zip(&found.probabilities) {
        assert!((0.0..=1.0).contains(p) && (*label >= 0) == (*p > 0.0));
    }
}

#[test]
fn one_cluster_only_where_allowed() {
    let mut rng = Rng::new(5);
    let data: Vec<f32> = rng.normals(200, 1.0).iter().map(|&x| x as f32).collect();
    let points = Points::new(&data, [100, 2]).unwrap();
    let alone = Hdbscan::new(40).allow_single_cluster(true).fit(points).unwrap();
    assert!(alone.labels.contains(&0) && alone.stabilities.len() == 1);
    assert!(Hdbscan::new(40).fit(points).unwrap().labels.iter().all(|&l| l == -1));
}

#[test]
fn odd_data_and_bad_calls() {
    let same = vec![1.5f32; 60];
    let points = Points::new(&same, [30, 2]).unwrap();
    let found = Hdbscan::new(5).allow_single_cluster(true).fit(points).unwrap();
    assert!(found.probabilities.iter().all(|p| p.is_finite()) && found.tree.iter().all(|e| e.weight == 0.0));
    // Two heaps of duplicates are two clusters.
    let heaps: Vec<f32> = (0..40).map(|i| if i % 2 == 0 { 0.0 } else { 7.0 }).collect();
    let found = Hdbscan::new(5).fit(Points::new(&heaps, [40, 1]).unwrap()).unwrap();
    assert!((0..40).all(|i| found.labels[i] == found.labels[i % 2]) && found.labels[0] != found.labels[1]);
    let one = Points::new(&[1.0], [1, 1]).unwrap();
    assert_eq!(Hdbscan::new(2).fit(one).unwrap().labels, [-1]);
    assert_eq!(Dbscan::new(1.0).min_samples(1).fit(one).unwrap().labels, [0]);
    let text = Hdbscan::new(1).fit(points).unwrap_err().to_string();
    assert!(text.starts_with("`min_cluster_size` is 1, allowed: 2 to "), "{text}");
    assert!(Hdbscan::new(2).min_samples(0).fit(points).is_err());
    for radius in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(Dbscan::new(radius).fit(points).unwrap_err().to_string().starts_with("`radius` is "));
    }
    assert!(Dbscan::new(1.0).min_samples(0).fit(points).is_err());
}

/// The definition, by flooding from each core.
fn plain(points: Points<'_>, radius: f64, least: usize) -> Vec<i32> {
    let n = points.len();
    let near = |i: usize| -> Vec<usize> {
        let reach = |&j: &usize| oracle::far(Metric::Euclidean, points.row(i), points.row(j)) <= radius * radius;
        (0..n).filter(reach).collect()
    };
    let lists: Vec<Vec<usize>> = (0..n).map(near).collect();
    let mut labels = vec![-1; n];
    let mut cluster = 0;
    for i in 0..n {
        if labels[i] >= 0 || lists[i].len() < least {
            continue;
        }
        let mut rest = vec![i];
        labels[i] = cluster;
        while let Some(at) = rest.pop() {
            if lists[at].len() < least {
                continue;
            }
            for &j in &lists[at] {
                if labels[j] < 0 {
                    labels[j] = cluster;
                    rest.push(j);
                }
            }
        }
        cluster += 1;
    }
    labels
}

#[test]
fn dbscan_is_its_definition() {
    let mut rng = Rng::new(8);
    for [n, d, centres] in [[40, 1, 2], [700, 3, 4], [900, 20, 3]] {
        let data = blobs(&mut rng, n, d, centres, n / 10);
        let n = n + n / 10;
        let points = Points::new(&data, [n, d]).unwrap();
        for radius in [0.3 * (d as f64).sqrt(), 1.2 * (d as f64).sqrt(), 100.0] {
            let want = plain(points, radius, 4);
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let options = Options { isa: Some(isa), threads: Some(threads), rescale: None };
                    let found = Dbscan::new(radius).min_samples(4).options(options).fit(points).unwrap();
                    assert_eq!(found.labels, want, "{isa:?} {n} {d} {radius}");
                }
            }
        }
    }
}
