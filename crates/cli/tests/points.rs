//! `cluster`, `neighbors` and `svd`: what they write, what they tell, and what they refuse.

use crate::common::{folder, fulgurite, read, refuses, succeeds, write};
use fulgurite::{DType, Tensor};
use fulgurite_core::random::Rng;
use std::path::Path;

/// Three heaps of rows, 30 apart.
fn heaps(folder: &Path, n: usize, d: usize) -> Tensor {
    let mut rng = Rng::new(3);
    let values: Vec<f64> =
        (0..n).flat_map(|i| rng.normals(d, 1.0).into_iter().map(move |x| x + (i % 3) as f64 * 30.0)).collect();
    let points = Tensor::from_f64(DType::F32, &values, &[n, d]).unwrap();
    write(folder, "rows", &[("points", &points)]);
    write(folder, "rows.safetensors", &[("points", &points)]);
    points
}

fn labels(folder: &Path, out: &str) -> Vec<i32> {
    read(folder, out, "labels").as_slice::<i32>().unwrap().to_vec()
}

#[test]
fn clusters_are_found_from_both_formats_and_drawn() {
    let folder = folder("points-cluster");
    heaps(&folder, 300, 5);
    for (input, out) in [("rows/points.npy", "a.safetensors"), ("rows.safetensors", "b")] {
        let kmeans = ["cluster", "kmeans", input, "-k", "3", "--seed", "1", "-o", out, "--report", "page.html"];
        let text = succeeds(&folder, &kmeans);
        assert!(
            text.contains("clusters 3") && text.contains("labels i32 [300]") && text.contains("centroids f32 [3, 5]"),
            "{text}"
        );
        let found = labels(&folder, out);
        assert!((0..300).all(|i| found[i] == found[i % 3]) && found[0] != found[1]);
        let page = std::fs::read_to_string(folder.join("page.html")).unwrap();
        assert_eq!(page.matches("<circle").count(), 300);
    }
    for method in [&["hdbscan", "--min-cluster-size", "10"][..], &["dbscan", "--radius", "4"]] {
        let args =
            [&["cluster", method[0], "rows.safetensors", "-o", "c.safetensors", "--json"], &method[1..]].concat();
        let told: serde_json::Value = serde_json::from_str(&succeeds(&folder, &args)).unwrap();
        assert_eq!(told["clusters"], 3, "{told}");
        let found = labels(&folder, "c.safetensors");
        assert!((0..300).all(|i| found[i] == found[i % 3] || found[i] == -1));
    }
}

#[test]
fn a_file_in_parts_and_mini_batches() {
    let folder = folder("points-parts");
    heaps(&folder, 5000, 4);
    let base = ["cluster", "kmeans", "rows/points.npy", "-k", "3", "--init", "random", "--seed", "2"];
    succeeds(&folder, &[&base[..], &["-o", "whole.safetensors"]].concat());
    succeeds(&folder, &[&base[..], &["-o", "parts.safetensors", "--memory", "8"]].concat());
    assert_eq!(labels(&folder, "whole.safetensors"), labels(&folder, "parts.safetensors"));
    // The same rows in the other format.
    let named = ["cluster", "kmeans", "rows.safetensors", "-k", "3", "--init", "random", "--seed", "2"];
    succeeds(&folder, &[&named[..], &["-o", "named.safetensors", "--memory", "8"]].concat());
    assert_eq!(labels(&folder, "whole.safetensors"), labels(&folder, "named.safetensors"));
    let batches = ["cluster", "kmeans", "rows/points.npy", "-k", "3", "--batch", "200", "--json", "--steps", "50"];
    let told = succeeds(&folder, &batches);
    assert!(told.contains("\"inertia\""), "{told}");
}

#[test]
fn neighbours_and_components() {
    let folder = folder("points-neighbors");
    let points = heaps(&folder, 60, 4);
    succeeds(&folder, &["neighbors", "rows.safetensors", "-k", "4", "-o", "n.safetensors"]);
    let rows = read(&folder, "n.safetensors", "rows");
    assert_eq!(rows.shape()[..], [60, 4]);
    let found = rows.as_slice::<i32>().unwrap();
    assert!(
        found
            .chunks_exact(4)
            .enumerate()
            .all(|(i, near)| near.iter().all(|&j| j as usize % 3 == i % 3 && j as usize != i))
    );
    let args = [
        "neighbors",
        "rows.safetensors",
        "-k",
        "2",
        "--queries",
        "rows/points.npy",
        "--score-tolerance",
        "0.0",
        "--lists",
        "3",
        "--probes",
        "3",
        "--json",
    ];
    let told: serde_json::Value = serde_json::from_str(&succeeds(&folder, &args)).unwrap();
    assert_eq!((&told["recall"], &told["queries"]), (&1.0.into(), &60.into()));
    let text = succeeds(&folder, &["svd", "rows.safetensors", "-k", "2", "--centred", "-o", "s.safetensors"]);
    assert!(text.contains("method gram") && text.contains("share of the variance 0.9"), "{text}");
    let coordinates = read(&folder, "s.safetensors", "coordinates");
    assert_eq!(coordinates.shape()[..], [60, 2]);
    assert_eq!(read(&folder, "s.safetensors", "mean").shape()[..], [points.shape()[1]]);
}

#[test]
fn wrong_calls_are_refused_and_write_nothing() {
    let folder = folder("points-refuse");
    heaps(&folder, 20, 2);
    let kmeans = |more: &[&'static str]| -> Vec<&'static str> {
        [&["cluster", "kmeans"], more, &["-o", "out.safetensors"]].concat()
    };
    refuses(
        &folder,
        &kmeans(&["rows.safetensors", "-k", "21"]),
        "`clusters` is 21, allowed: 1 to 20; there are not more points",
    );
    refuses(
        &folder,
        &kmeans(&["rows.safetensors", "-k", "2", "--name", "x"]),
        "rows.safetensors has no tensor `x`, it has: points; choose one with --name",
    );
    refuses(
        &folder,
        &kmeans(&["rows.txt", "-k", "2"]),
        "`IN` is rows.txt, allowed: a name ending in .npy or .safetensors",
    );
    refuses(&folder, &kmeans(&["no.npy", "-k", "2"]), "cannot read no.npy: no such file or folder; check the path");
    let nan = Tensor::new(vec![1.0f32, f32::NAN, 2.0, 3.0], &[2, 2]).unwrap();
    write(&folder, "nan.safetensors", &[("points", &nan)]);
    refuses(
        &folder,
        &kmeans(&["nan.safetensors", "-k", "1"]),
        "`points` row 0 column 1 is NaN, allowed: finite numbers; drop or fill such rows",
    );
    for shape in [&[0usize, 3][..], &[3, 0]] {
        write(&folder, "empty.safetensors", &[("points", &Tensor::new(Vec::<f32>::new(), shape).unwrap())]);
        let done = fulgurite(&folder, &kmeans(&["empty.safetensors", "-k", "1"]));
        assert!(done.code == 2 && done.err.contains("at least one row and one column"), "{}", done.err);
    }
    let cube = Tensor::new(vec![0.0f32; 8], &[2, 2, 2]).unwrap();
    write(&folder, "cube.safetensors", &[("points", &cube)]);
    refuses(
        &folder,
        &kmeans(&["cube.safetensors", "-k", "1"]),
        "cube.safetensors has 3 axes, allowed: 2 (rows of elements)",
    );
    let whole = std::fs::read(folder.join("rows/points.npy")).unwrap();
    std::fs::write(folder.join("cut.npy"), &whole[..whole.len() - 4]).unwrap();
    let whole = std::fs::read(folder.join("rows.safetensors")).unwrap();
    std::fs::write(folder.join("cut.safetensors"), &whole[..whole.len() - 4]).unwrap();
    for more in [
        &["cut.npy", "-k", "2"][..],
        &["cut.npy", "-k", "2", "--memory", "1"],
        &["cut.safetensors", "-k", "2"],
        &["cut.safetensors", "-k", "2", "--memory", "1"],
    ] {
        let done = fulgurite(&folder, &kmeans(more));
        assert!(done.code == 2 && done.err.contains("cut"), "{}", done.err);
    }
    let half = Tensor::from_f64(DType::F16, &[1.0, 2.0], &[1, 2]).unwrap();
    write(&folder, "half.safetensors", &[("points", &half)]);
    for (file, text) in [
        (
            "half.safetensors",
            "half.safetensors: `points` is \"F16\", allowed in parts: F32; convert it, or leave --memory out",
        ),
        ("cube.safetensors", "cube.safetensors: `points` does not have two axes; reshape it to rows"),
    ] {
        refuses(&folder, &kmeans(&[file, "-k", "1", "--memory", "1"]), text);
    }
    refuses(
        &folder,
        &kmeans(&["rows.safetensors", "-k", "2", "--name", "x", "--memory", "1"]),
        "rows.safetensors: has no tensor `x`, it has: points; choose one with --name",
    );
    for length in [0u64, 5, u64::MAX] {
        std::fs::write(folder.join("odd.safetensors"), [&length.to_le_bytes()[..], b"{}{}{"].concat()).unwrap();
        let done = fulgurite(&folder, &kmeans(&["odd.safetensors", "-k", "1", "--memory", "1"]));
        assert!(done.code == 2 && done.err.contains("odd.safetensors: "), "{}", done.err);
    }
    refuses(
        &folder,
        &kmeans(&["rows.safetensors", "-k", "2", "--score-tolerance", "-1"]),
        "`score_tolerance` is -1, allowed: 0 or more; leave it out to be exact",
    );
    refuses(
        &folder,
        &["neighbors", "rows.safetensors", "-k", "20"],
        "`k` is 20, allowed: 1 to 19; there are not more rows to find",
    );
    refuses(&folder, &["neighbors", "rows.safetensors", "-k", "0"], "`k` is 0, allowed: 1 to 19; at least one");
    refuses(
        &folder,
        &["svd", "rows.safetensors", "-k", "3"],
        "`components` is 3, allowed: 1 to 2; not more components than rows or columns",
    );
    refuses(
        &folder,
        &["cluster", "dbscan", "rows.safetensors", "--radius", "-1"],
        "`radius` is -1, allowed: finite and above 0; the distance of neighbours",
    );
    assert!(!folder.join("out.safetensors").exists());
}

/// Where one of the results cannot be written, none is, and what was there before stays.
#[test]
fn nothing_is_written_half() {
    let folder = folder("points-half");
    heaps(&folder, 30, 2);
    std::fs::create_dir_all(folder.join("out/centroids.npy")).unwrap();
    std::fs::create_dir_all(folder.join("out/centroids.npy/in the way")).unwrap();
    std::fs::write(folder.join("out/labels.npy"), "before").unwrap();
    std::fs::write(folder.join("page.html"), "before").unwrap();
    let args = ["cluster", "kmeans", "rows.safetensors", "-k", "3", "-o", "out", "--report", "page.html"];
    let done = fulgurite(&folder, &args);
    assert!(done.code != 0 && done.err.contains("cannot write out/centroids.npy"), "{}", done.err);
    for file in ["out/labels.npy", "page.html"] {
        assert_eq!(std::fs::read_to_string(folder.join(file)).unwrap(), "before");
    }
    let left: Vec<String> = [".", "out"]
        .iter()
        .flat_map(|place| std::fs::read_dir(folder.join(place)).unwrap())
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".part"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Every command on the data that breaks programs: refused by name, or an answer.
#[test]
fn odd_rows_go_through_every_command() {
    let folder = folder("points-odd");
    let row = |values: Vec<f32>, shape: [usize; 2]| Tensor::new(values, &shape).unwrap();
    for (name, points, refused) in [
        (
            "nan",
            row(vec![1.0, 2.0, f32::NAN, 4.0], [2, 2]),
            Some("`points` row 1 column 0 is NaN, allowed: finite numbers"),
        ),
        ("inf", row(vec![1.0, f32::INFINITY], [2, 1]), Some("`points` row 1 column 0 is inf, allowed: finite numbers")),
        ("no rows", row(vec![], [0, 2]), Some("`points` has shape [0, 2], allowed: at least one row and one column")),
        (
            "no columns",
            row(vec![], [2, 0]),
            Some("`points` has shape [2, 0], allowed: at least one row and one column"),
        ),
        ("one", row(vec![3.0, 4.0], [1, 2]), None),
        ("same", row(vec![0.5; 60], [20, 3]), None),
    ] {
        let file = format!("{name}.safetensors");
        write(&folder, &file, &[("points", &points)]);
        for (i, command) in [
            &["cluster", "kmeans", "-k", "1"][..],
            &["cluster", "hdbscan"],
            &["cluster", "dbscan", "--radius", "1"],
            &["neighbors", "-k", "1", "--queries", &file],
            &["neighbors", "-k", "1", "--queries", &file, "--lists", "1", "--probes", "1"],
            &["svd", "-k", "1", "--centred"],
            &["svd", "-k", "1"],
        ]
        .into_iter()
        .enumerate()
        {
            let (out, page) = (format!("{name}-{i}.safetensors"), format!("{name}-{i}.html"));
            let all = [command, &[&file, "-o", &out, "--report", &page, "--json"]].concat();
            let done = fulgurite(&folder, &all);
            match refused {
                Some(text) => {
                    assert!(done.code == 2 && done.err.contains(text), "{command:?} {name}: {}", done.err);
                    assert!(!folder.join(&out).exists() && !folder.join(&page).exists());
                }
                None => {
                    assert_eq!(done.code, 0, "{command:?} {name}: {}", done.err);
                    assert!(!done.out.contains("null"), "a figure is no number: {}", done.out);
                    let page = std::fs::read_to_string(folder.join(&page)).unwrap();
                    assert_eq!(page.matches("<circle").count(), points.shape()[0]);
                }
            }
        }
    }
}
