//! The readers take any bytes: thousands of broken files, no panic.

use fulgurite::{DType, Tensor};
use fulgurite_cli::cache;
use fulgurite_cli::io::{npy, safetensors};
use fulgurite_core::random::Rng;

/// How many times the usual number of files: `FULGURITE_FACTOR=20` makes a million of them.
fn factor() -> usize {
    std::env::var("FULGURITE_FACTOR").map_or(1, |text| text.parse().expect("FULGURITE_FACTOR is a number"))
}

fn mutate(rng: &mut Rng, whole: &[u8]) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..rng.range(1..6) {
        let at = rng.range(0..bytes.len().max(1)).min(bytes.len().saturating_sub(1));
        match rng.range(0..6) {
            _ if bytes.is_empty() => bytes.push(0),
            0 => bytes[at] = rng.bits() as u8,
            1 => bytes[at] ^= 1 << rng.range(0..8),
            2 => bytes.truncate(at),
            3 => bytes.insert(at, rng.pick(b"0123456789[]{}(),'\":<>-fiFI \xff")),
            4 => {
                bytes.remove(at);
            }
            // Text is where the structure is: swap digits there.
            _ => {
                let digits: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    bytes[rng.pick(&digits)] = b'0' + rng.range(0..10) as u8;
                }
            }
        }
    }
    bytes
}

#[test]
fn broken_safetensors_never_panic() {
    let rng = &mut Rng::new(11);
    let tensors =
        [DType::F32, DType::F16, DType::Bf16, DType::I32].map(|dtype| Tensor::zeros(dtype, &[2, 3, 4]).unwrap());
    let names = ["q", "k", "v", "cu_seqlens"].map(String::from);
    let whole = safetensors::encode(&names.into_iter().zip(&tensors).collect::<Vec<_>>()).unwrap();
    let (mut refused, files) = (0, 20_000 * factor());
    for _ in 0..files {
        refused += usize::from(safetensors::decode(&mutate(rng, &whole)).is_err());
    }
    assert!((files / 20..files).contains(&refused), "{refused}: the mutations are too weak or too strong");
}

#[test]
fn broken_npy_never_panics() {
    let rng = &mut Rng::new(12);
    for dtype in [DType::F32, DType::F16, DType::I32] {
        let whole = npy::encode(&Tensor::zeros(dtype, &[2, 3, 4]).unwrap()).unwrap();
        let (mut refused, files) = (0, 5000 * factor());
        for _ in 0..files {
            refused += usize::from(npy::decode(&mutate(rng, &whole)).is_err());
        }
        assert!((files / 10..files).contains(&refused), "{refused}: the mutations are too weak or too strong");
    }
}

/// Saved caches in floating point and packed, as the fuzzer begins with.
#[test]
fn broken_caches_never_panic() {
    let rng = &mut Rng::new(14);
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/cache");
    let files: Vec<Vec<u8>> =
        std::fs::read_dir(folder).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(files.len() > 2);
    for whole in &files {
        assert!(cache::decode(whole).is_ok());
        for _ in 0..1000 * factor() {
            if let Ok(found) = cache::decode(&mutate(rng, whole)) {
                // What was read is a cache: it can be written.
                cache::encode(&found).unwrap();
            }
        }
    }
}

#[test]
fn noise_never_panics() {
    let rng = &mut Rng::new(13);
    for _ in 0..5000 * factor() {
        let length = rng.range(0..200);
        let mut bytes: Vec<u8> = (0..length).map(|_| rng.bits() as u8).collect();
        assert!(safetensors::decode(&bytes).is_err());
        let magic = b"\x93NUMPY\x01\x00";
        if bytes.len() > magic.len() {
            bytes[..magic.len()].copy_from_slice(magic);
        }
        let _ = npy::decode(&bytes);
    }
}

#[test]
fn npy_in_column_order_and_big_endian() {
    let header = |descr: &str, fortran: &str| {
        let text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': (2, 3), }}\n");
        [b"\x93NUMPY\x01\x00", &(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
    };
    let decode = |head: Vec<u8>, data: Vec<u8>| match npy::decode(&[head, data].concat()).unwrap() {
        fulgurite_cli::io::Stored::Tensor(tensor) => tensor.view().to_f64(),
        other => panic!("{other:?}"),
    };
    let columns = [0.0f32, 3.0, 1.0, 4.0, 2.0, 5.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(decode(header("<f4", "True"), columns), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let big = (0..6i64).flat_map(i64::to_be_bytes).collect();
    assert_eq!(decode(header(">i8", "False"), big), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}
