//! k-means over files larger than the memory it is allowed, by mini-batches, and over files that are wrong.

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Error, FileRows, Init, KMeans, Metric, Points, RowSource};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

fn npy(data: &[f32], shape: [usize; 2]) -> Vec<u8> {
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", shape[0], shape[1]);
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data.iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("fulgurite-neighbors-{}-{name}.npy", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    path
}

fn random(seed: u64, n: usize, d: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n * d).map(|i| (rng.uniform() + (i / d % 5) as f64 * 0.3) as f32).collect()
}

#[test]
fn a_file_in_parts_gives_the_bits_of_memory() {
    // Three parts of 32,768 rows and a rest; two may be held.
    let (n, d, k) = (3 * 32768 + 1234, 5, 17);
    let data = random(1, n, d);
    let points = Points::new(&data, [n, d]).unwrap();
    let path = file("parts", &npy(&data, [n, d]));
    let memory = 2 * 32768 * d * 4;
    assert!(memory < n * d * 4);
    for metric in [Metric::Euclidean, Metric::Cosine] {
        for init in [Init::Given(points.part(0, k)), Init::Random] {
            let kmeans = KMeans::new(k).metric(metric).init(init).seed(5).max_steps(4).tolerance(0.0);
            let want = kmeans.fit(points).unwrap();
            let mut told = 0;
            let source = FileRows::open(&path).unwrap();
            let got = kmeans.fit_rows(&source, memory, &mut |p| told = told.max(p.rows)).unwrap();
            assert_eq!(got.labels(), want.labels(), "{metric:?}");
            assert_eq!(got.centroids(), want.centroids());
            assert_eq!(got.inertia().to_bits(), want.inertia().to_bits());
            assert_eq!((got.steps(), told), (want.steps(), n));
        }
    }
    // All rows fit: k-means++ looks at all of them too.
    let kmeans = KMeans::new(k).seed(5).max_steps(2);
    let source = FileRows::open(&path).unwrap();
    let got = kmeans.fit_rows(&source, 4 * n * d * 4, &mut |_| ()).unwrap();
    assert_eq!(got.labels(), kmeans.fit(points).unwrap().labels());
    let refused = kmeans.fit_rows(&source, 1000, &mut |_| ()).unwrap_err().to_string();
    assert!(refused.starts_with("`memory_bytes` is 1000, allowed: 1310720 to "), "{refused}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn mini_batches_come_close() {
    let (n, d) = (20_000, 3);
    let mut rng = Rng::new(4);
    let data: Vec<f32> =
        (0..n).flat_map(|i| rng.normals(d, 1.0).into_iter().map(move |x| (x + (i % 4) as f64 * 25.0) as f32)).collect();
    let points = Points::new(&data, [n, d]).unwrap();
    let kmeans = KMeans::new(4).seed(2).max_steps(60);
    let want = kmeans.fit(points).unwrap();
    let got = kmeans.fit_batches(&points, 256, 1 << 24, &mut |_| ()).unwrap();
    assert!(got.inertia() <= want.inertia() * 1.02, "{} for {}", got.inertia(), want.inertia());
    assert_eq!(got.labels().len(), n);
    assert_eq!(got.centroids(), kmeans.fit_batches(&points, 256, 1 << 24, &mut |_| ()).unwrap().centroids());
    let refused = kmeans.fit_batches(&points, 0, 1 << 24, &mut |_| ()).unwrap_err().to_string();
    assert_eq!(refused, "`batch` is 0, allowed: 1 to 20000; rows drawn for each step");
}

#[test]
fn wrong_files_are_refused_by_name() {
    let whole = npy(&[1.0, 2.0, 3.0, 4.0], [2, 2]);
    let text = |name: &str, bytes: &[u8]| {
        let path = file(name, bytes);
        let error = FileRows::open(&path).map(|_| ()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        error.strip_prefix(&format!("{}: ", path.display())).expect("the path first").to_string()
    };
    assert!(text("cut", &whole[..whole.len() - 3]).starts_with("is cut short: "));
    assert_eq!(text("short", &whole[..5]), "is shorter than any .npy file; write it again");
    assert_eq!(text("header", &whole[..20]), "ends in its header; write it again");
    assert_eq!(text("zip", b"PK\x03\x04 and more bytes"), "is no .npy file; write it with numpy.save");
    let swap = |from: &str, to: &str| {
        let head = String::from_utf8_lossy(&whole[10..]).into_owned();
        let at = head.find(from).unwrap() + 10;
        let mut bytes = whole.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    assert_eq!(text("f8", &swap("<f4", "<f8")), "does not hold little-endian f32; convert it with .astype('<f4')");
    assert_eq!(text("order", &swap("False", "True ")), "is stored by columns; write it with numpy.ascontiguousarray");
    assert_eq!(text("axes", &swap("(2, 2)", "(4,  )")), "does not have two axes; reshape it to rows");
    assert!(text("huge", &swap("(2, 2)", "(9, 9)")).starts_with("is cut short: "));
    assert!(
        FileRows::open(std::path::Path::new("/nowhere/at/all.npy")).unwrap_err().to_string().contains("check the path")
    );
}

#[test]
fn nan_in_a_file_is_named_by_its_row() {
    let (n, d) = (40_000, 2);
    let mut data = random(2, n, d);
    data[39_000 * d + 1] = f32::NAN;
    let path = file("nan", &npy(&data, [n, d]));
    let source = FileRows::open(&path).unwrap();
    let error = KMeans::new(3).fit_rows(&source, 2 * 32768 * d * 4, &mut |_| ()).unwrap_err();
    std::fs::remove_file(path).unwrap();
    assert!(matches!(error, Error::NotFinite { row: 39_000, column: 1, .. }), "{error}");
}

/// The first of many parts is refused while the next ones are being read.
#[test]
fn an_error_in_the_first_part_ends_the_reading() {
    let (n, d) = (6 * 32768, 2);
    let mut data = random(5, n, d);
    data[7 * d..8 * d].fill(0.0);
    let points = Points::new(&data, [n, d]).unwrap();
    let cosine = KMeans::new(3).metric(Metric::Cosine);
    let error = cosine.fit_rows(&points, 2 * 32768 * d * 4, &mut |_| ()).unwrap_err();
    assert!(matches!(error, Error::NoAngle { row: 7, .. }), "{error}");
    // A row of another part is named by its number in the whole.
    data.copy_within(0..2 * d, 7 * d);
    data[40_000 * d..40_001 * d].fill(0.0);
    let points = Points::new(&data, [n, d]).unwrap();
    let error = cosine.fit_rows(&points, 2 * 32768 * d * 4, &mut |_| ()).unwrap_err();
    assert!(matches!(error, Error::NoAngle { row: 40_000, .. }), "{error}");
}

#[test]
fn a_file_that_changes_while_it_is_read_is_told() {
    let (n, d) = (70_000, 2);
    let data = random(3, n, d);
    for cut in [true, false] {
        let bytes = npy(&data, [n, d]);
        let path = file(if cut { "shrinks" } else { "grows" }, &bytes);
        let source = FileRows::open(&path).unwrap();
        let calls = AtomicUsize::new(0);
        let error = KMeans::new(3)
            .max_steps(5)
            .init(Init::Random)
            .fit_rows(&source, 2 * 32768 * d * 4, &mut |_| {
                if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                    file.set_len(if cut { 1000 } else { bytes.len() as u64 + 8 }).unwrap();
                }
            })
            .unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
    }
}

#[test]
fn sources_of_no_rows_are_refused() {
    struct Nothing([usize; 2]);
    impl RowSource for Nothing {
        fn shape(&self) -> [usize; 2] {
            self.0
        }
        fn read(&self, _: usize, _: &mut [f32]) -> Result<(), Error> {
            Ok(())
        }
    }
    for shape in [[0, 4], [4, 0]] {
        let error = KMeans::new(1).fit_rows(&Nothing(shape), 1 << 20, &mut |_| ()).unwrap_err();
        assert!(matches!(error, Error::Empty { .. }), "{error}");
    }
    let many = KMeans::new(1).fit_rows(&Nothing([1 << 40, 1]), 1 << 20, &mut |_| ()).unwrap_err();
    assert!(matches!(many, Error::TooMany { .. }), "{many}");
}
