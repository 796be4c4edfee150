//! Singular values against data whose decomposition is known.

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Isa, Method, Options, Pca, Points, TruncatedSvd};

/// Columns orthonormal, `[n][k]`.
fn orthonormal(rng: &mut Rng, n: usize, k: usize) -> Vec<f64> {
    let mut columns: Vec<Vec<f64>> = (0..k).map(|_| rng.normals(n, 1.0)).collect();
    for c in 0..k {
        for _ in 0..2 {
            for b in 0..c {
                let dot: f64 = columns[b].iter().zip(&columns[c]).map(|(x, y)| x * y).sum();
                let other = columns[b].clone();
                columns[c].iter_mut().zip(other).for_each(|(x, o)| *x -= dot * o);
            }
        }
        let norm = columns[c].iter().map(|x| x * x).sum::<f64>().sqrt();
        columns[c].iter_mut().for_each(|x| *x /= norm);
    }
    (0..n).flat_map(|i| columns.iter().map(move |c| c[i]).collect::<Vec<_>>()).collect()
}

/// Rows with the given singular values.
fn with_values(rng: &mut Rng, n: usize, d: usize, values: &[f64]) -> Vec<f32> {
    let k = values.len();
    let (u, v) = (orthonormal(rng, n, k), orthonormal(rng, d, k));
    let at = |i: usize, j: usize| (0..k).map(|c| u[i * k + c] * values[c] * v[j * k + c]).sum::<f64>();
    (0..n * d).map(|x| at(x / d, x % d) as f32).collect()
}

#[test]
fn singular_values_have_five_digits_over_four_powers_of_ten() {
    let mut rng = Rng::new(1);
    for [n, d] in [[700, 40], [40, 700], [64, 64], [5, 3]] {
        let rank = n.min(d).min(30);
        // From 1000 down by equal factors to 0.1, or a part of that.
        let values: Vec<f64> = (0..rank).map(|i| 1000.0 * 10f64.powf(-4.0 * i as f64 / 29.0)).collect();
        let data = with_values(&mut rng, n, d, &values);
        let points = Points::new(&data, [n, d]).unwrap();
        let k = rank.min(12);
        let mut before: Option<(Vec<f64>, Vec<f32>)> = None;
        for threads in [1, 2, 3] {
            let options = Options { isa: None, threads: Some(threads), rescale: None };
            let found = TruncatedSvd::new(k).options(options).fit(points).unwrap();
            for (got, want) in found.singular_values().iter().zip(&values) {
                assert!((got - want).abs() <= 1e-5 * want, "{n} x {d}: {got} for {want}");
            }
            let now = (found.singular_values().to_vec(), found.components().to_vec());
            assert!(before.is_none_or(|before| before == now), "bits depend on threads");
            before = Some(now);
        }
    }
}

#[test]
fn components_are_orthonormal_and_rebuild_the_data() {
    let mut rng = Rng::new(4);
    let values = [50.0, 20.0, 9.0, 4.0];
    let data = with_values(&mut rng, 300, 25, &values);
    let points = Points::new(&data, [300, 25]).unwrap();
    for isa in Isa::available() {
        let options = Options { isa: Some(isa), threads: None, rescale: None };
        let found = TruncatedSvd::new(4).options(options).fit(points).unwrap();
        let c = found.components();
        for a in 0..4 {
            for b in 0..4 {
                let dot: f32 = (0..25).map(|j| c[a * 25 + j] * c[b * 25 + j]).sum();
                assert!((dot - f32::from(u8::from(a == b))).abs() <= 1e-5);
            }
        }
        let coordinates = found.transform(points).unwrap();
        let back = found.inverse_transform(Points::new(&coordinates, [300, 4]).unwrap()).unwrap();
        assert!(back.iter().zip(&data).all(|(a, b)| (a - b).abs() <= 1e-4), "{isa:?}");
    }
}

#[test]
fn the_randomised_form_keeps_its_tolerance() {
    let mut rng = Rng::new(7);
    // Slow decay: a fixed number of passes would not do.
    let values: Vec<f64> = (0..60).map(|i| 100.0 * 0.97f64.powi(i)).collect();
    let data = with_values(&mut rng, 450, 400, &values);
    let points = Points::new(&data, [450, 400]).unwrap();
    let found = TruncatedSvd::new(8).tolerance(Some(1e-4)).seed(3).fit(points).unwrap();
    assert_eq!(found.method(), Method::Randomised);
    for (got, want) in found.singular_values().iter().zip(&values) {
        assert!((got - want).abs() <= 1e-4 * want, "{got} for {want}");
    }
    // Where the Gram matrix is less work, it is taken.
    let narrow = Points::new(&data[..300 * 400], [300 * 4, 100]).unwrap();
    assert_eq!(TruncatedSvd::new(8).tolerance(Some(0.1)).fit(narrow).unwrap().method(), Method::Gram);
    let again = TruncatedSvd::new(8).tolerance(Some(1e-4)).seed(3).fit(points).unwrap();
    assert_eq!(found.components(), again.components());
}

#[test]
fn pca_takes_the_mean_off() {
    let mut rng = Rng::new(2);
    let mut data = with_values(&mut rng, 400, 10, &[30.0, 10.0]);
    data.chunks_exact_mut(10).for_each(|row| row.iter_mut().enumerate().for_each(|(j, x)| *x += 100.0 * j as f32));
    let points = Points::new(&data, [400, 10]).unwrap();
    let found = Pca::new(2).fit(points).unwrap();
    let share: f64 = found.explained_variance_ratio().iter().sum();
    assert!((share - 1.0).abs() <= 1e-4, "{share}");
    assert!((found.mean().unwrap()[3] - 300.0).abs() < 1.0);
    let coordinates = found.transform(points).unwrap();
    let mean: f64 = coordinates.iter().step_by(2).map(|&x| f64::from(x)).sum::<f64>() / 400.0;
    assert!(mean.abs() <= 1e-3);
}

#[test]
fn odd_data_and_bad_calls() {
    let same = vec![3.0f32; 20 * 4];
    let points = Points::new(&same, [20, 4]).unwrap();
    let found = Pca::new(2).fit(points).unwrap();
    assert!(found.singular_values().iter().all(|&s| s < 1e-3));
    let found = TruncatedSvd::new(4).fit(points).unwrap();
    assert!((found.singular_values()[0] - 3.0 * 80f64.sqrt()).abs() <= 1e-4);
    let one = Points::new(&[3.0, 4.0], [1, 2]).unwrap();
    assert!((TruncatedSvd::new(1).fit(one).unwrap().singular_values()[0] - 5.0).abs() <= 1e-6);
    let alone = Pca::new(1).fit(one).unwrap();
    assert_eq!((alone.singular_values(), alone.explained_variance_ratio()), (&[0.0][..], vec![0.0]));
    assert_eq!(alone.transform(one).unwrap(), [0.0]);
    let zeros = [0.0f32; 6];
    assert_eq!(TruncatedSvd::new(1).fit(Points::new(&zeros, [3, 2]).unwrap()).unwrap().singular_values(), [0.0]);
    for (k, want) in [
        (0, "`components` is 0, allowed: 1 to 4; not more components than rows or columns"),
        (5, "`components` is 5, allowed: 1 to 4; not more components than rows or columns"),
    ] {
        assert_eq!(TruncatedSvd::new(k).fit(points).unwrap_err().to_string(), want);
    }
    let refused = TruncatedSvd::new(1).tolerance(Some(-1.0)).fit(points).unwrap_err();
    assert_eq!(refused.to_string(), "`tolerance` is -1, allowed: above 0; leave it out to be exact");
    for scale in [1e-25f32, 1e25] {
        let data: Vec<f32> = [3.0, 0.0, 0.0, 4.0, 0.0, 0.0].iter().map(|x| x * scale).collect();
        let found = TruncatedSvd::new(2).fit(Points::new(&data, [3, 2]).unwrap()).unwrap();
        let want = [4.0 * f64::from(scale), 3.0 * f64::from(scale)];
        assert!(found.singular_values().iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-6 * b), "{found:?}");
    }
}
