//! Sums of products in f64.

/// x . y, in sums side by side that a compiler makes vectors of.
pub fn dot<T: Copy + Into<f64>>(x: &[T], y: &[T]) -> f64 {
    const SUMS: usize = 8;
    let mut sums = [0.0f64; SUMS];
    let (x, y) = (x.chunks_exact(SUMS), y.chunks_exact(SUMS));
    let rest: f64 = x.remainder().iter().zip(y.remainder()).map(|(&x, &y)| x.into() * y.into()).sum();
    for (x, y) in x.zip(y) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x.into() * y.into();
        }
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::dot;

    #[test]
    fn every_product_counts_once() {
        for n in 0..40 {
            // Powers of two: every subset of the products has its own sum.
            let x: Vec<f64> = (0..n).map(|i| f64::from(2).powi(i)).collect();
            assert_eq!(dot(&x, &vec![1.0; n as usize]), f64::from(2).powi(n) - 1.0);
        }
        assert_eq!(dot(&[3.0f32, 0.5], &[2.0, 4.0]), 8.0);
    }
}
