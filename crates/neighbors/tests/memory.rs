//! Results that no process can have are refused with their size, before any work.

use fulgurite_neighbors::{
    Decomposition, Error, KMeans, KMeansModel, KeySelector, Metric, NeighborIndex, Options, Points, RowSource,
};

const ROWS: usize = 1 << 20;

/// More rows than memory holds. Reading one of them is work, and a failure of the test.
struct Unread;

impl RowSource for Unread {
    fn shape(&self) -> [usize; 2] {
        [1 << 30, 1 << 24]
    }
    fn read(&self, _: usize, _: &mut [f32]) -> Result<(), Error> {
        panic!("rows were read before memory was asked for")
    }
}

fn bytes_of<T: std::fmt::Debug>(result: Result<T, Error>) -> usize {
    let refused = result.unwrap_err();
    assert!(matches!(refused, Error::Memory(_)), "{refused:?}");
    let text = refused.to_string();
    text.split("needs ").nth(1).and_then(|rest| rest.split(' ').next()).expect(&text).parse().expect(&text)
}

#[test]
fn refused_memory_is_an_error_with_its_size() {
    let data: Vec<f32> = (0..ROWS).map(|i| (i % 7) as f32).collect();
    let column = Points::new(&data, [ROWS, 1]).unwrap();
    let row = Points::new(&data, [1, ROWS]).unwrap();
    let model = KMeansModel::of(column, Metric::Euclidean, Options::default()).unwrap();
    assert_eq!(bytes_of(model.transform(column)), 4 << 40);
    let index = NeighborIndex::new(column, Metric::Euclidean, Options::default()).unwrap();
    assert!(bytes_of(index.search(column, ROWS)) > 16 << 40);
    assert!(bytes_of(index.search_self(ROWS - 1)) > 16 << 40);
    let one = Decomposition::of(row, None, Options::default()).unwrap();
    assert_eq!(bytes_of(one.inverse_transform(column)), 4 << 40);
    assert_eq!(bytes_of(KeySelector::new(0.5).block(1, 1).select(column, column, 1.0)), 12 << 40);
    let fit = KMeans::new(1 << 20);
    assert!(bytes_of(fit.fit_rows(&Unread, usize::MAX, &mut |_| ())) > 300 << 40);
    assert!(bytes_of(fit.fit_batches(&Unread, 1 << 20, usize::MAX, &mut |_| ())) > 300 << 40);
}
