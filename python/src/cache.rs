//! A key/value cache of one sequence, in floating point or packed to 4 and 2 bits. Use `fulgurite.KvCache`.

use crate::array::{Array, Claims, fresh, refuse, wrong};
use crate::gil::detach;
use crate::variants::{Engine, copy_into};
use fulgurite::cache::{CacheParts, CacheSpec, KvCache as Store, Storage, choose_bits};
use fulgurite::format::Bits;
use fulgurite::{Choice, DType, Error, Settings};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

fn refused(error: fulgurite::cache::CacheError) -> PyErr {
    refuse(Error::Cache(error))
}

fn bits(arg: &str, list: &[u8]) -> PyResult<Vec<Bits>> {
    let one = |&n: &u8| match n {
        4 => Ok(Bits::Four),
        2 => Ok(Bits::Two),
        _ => Err(wrong(format!("`{arg}` has {n}, allowed: 4 or 2 for each head"))),
    };
    list.iter().map(one).collect()
}

fn numbers(bits: &[Bits]) -> Vec<u8> {
    bits.iter().map(|bits| if *bits == Bits::Two { 2 } else { 4 }).collect()
}

/// Words and named byte arrays of a cache file.
type Contents = (BTreeMap<String, String>, BTreeMap<String, Vec<u8>>);

/// (heads, head_dim, value_dim, capacity), the name of the float type, and the bits of keys and of values by head.
type Sizes = ([usize; 4], Option<String>, Option<(Vec<u8>, Vec<u8>)>);

/// A cache; calls that change it exclude each other.
#[pyclass(frozen)]
pub struct Cache {
    store: RwLock<Store>,
    engine: Engine,
}

impl Cache {
    fn of(store: Store, engine: &str, threads: Option<i64>) -> PyResult<Cache> {
        let choice: Choice = engine.parse().map_err(|e: fulgurite::ChoiceError| wrong(e.to_string()))?;
        let settings = Settings::default();
        let settings = threads.map_or(settings.clone(), |n| settings.threads(n.max(0) as usize));
        let engine = Engine::new(choice, &settings, "the key/value cache").map_err(wrong)?;
        Ok(Cache { store: RwLock::new(store), engine })
    }

    /// Reads the cache without the GIL: a call that holds the lock may be waiting for the GIL.
    fn read<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&Store) -> T + Send) -> PyResult<T> {
        detach(py, || work(&self.store.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Cache {
    /// An empty cache. `sizes` is (heads, head_dim, value_dim, capacity); `storage` is the name of a float type, or bits
    /// of keys and of values by head.
    #[new]
    fn new(
        sizes: [usize; 4],
        float: Option<&str>,
        packed: Option<(Vec<u8>, Vec<u8>)>,
        engine: &str,
        threads: Option<i64>,
    ) -> PyResult<Cache> {
        let storage = match (float, packed) {
            (_, Some((k, v))) => Storage::Packed { k: bits("k_bits", &k)?, v: bits("v_bits", &v)? },
            (Some(name), None) => {
                let found = DType::FLOATS.into_iter().find(|known| known.name() == name);
                Storage::Float(found.ok_or_else(|| wrong(format!("`dtype` is {name:?}, allowed: f32, f16, bf16")))?)
            }
            (None, None) => Storage::Float(DType::F32),
        };
        let [heads, head_dim, value_dim, capacity] = sizes;
        let spec = CacheSpec { heads, head_dim, value_dim, capacity, storage };
        Cache::of(Store::new(spec).map_err(refused)?, engine, threads)
    }

    /// A cache from the contents of a file.
    #[staticmethod]
    fn load(contents: Contents, engine: &str, threads: Option<i64>) -> PyResult<Cache> {
        let (words, arrays) = contents;
        Cache::of(Store::from_parts(&CacheParts { words, arrays }).map_err(refused)?, engine, threads)
    }

    /// The contents of a file.
    fn save(&self, py: Python<'_>) -> PyResult<Contents> {
        let parts = self.read(py, Store::to_parts)?;
        Ok((parts.words, parts.arrays))
    }

    /// Appends tokens: k `[tokens, heads, head_dim]`, v `[tokens, heads, value_dim]`.
    fn append(&self, py: Python<'_>, k: &Bound<'_, PyAny>, v: &Bound<'_, PyAny>) -> PyResult<()> {
        let (k, v) = (Array::read("k", k)?, Array::read("v", v)?);
        detach(py, || {
            let mut claims = Claims::default();
            let (k, v) = (k.view("k", &mut claims)?, v.view("v", &mut claims)?);
            self.store.write().unwrap_or_else(PoisonError::into_inner).append(&k, &v).map_err(refused)
        })?
    }

    /// Attention of the last queries, `[queries, query heads, head_dim]`, over the cache. Returns o and the LSE.
    fn attend(&self, q: &Bound<'_, PyAny>, scale: f64) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        let py = q.py();
        let array = Array::read("q", q)?;
        let (o, lse) = self.read(py, |store| {
            let mut claims = Claims::default();
            let view = array.view("q", &mut claims)?;
            store.attend(&view, scale as f32, &self.engine.options()?).map_err(refused)
        })??;
        let mut done = Vec::new();
        for (tensor, f32) in [(&o, false), (&lse, true)] {
            let made = fresh(q, &array, tensor.shape(), if f32 { Some(crate::array::Element::F32) } else { None })?;
            let to = Array::of_result("o", made.object(py))?;
            copy_into(tensor, &mut to.view_mut("o", &mut Claims::default())?)?;
            done.push(made.finish(py)?);
        }
        let lse = done.pop().ok_or_else(|| wrong("the LSE is missing"))?;
        Ok((done.pop().ok_or_else(|| wrong("o is missing"))?, lse))
    }

    /// Removes all but the first `len` tokens.
    fn truncate(&self, py: Python<'_>, len: usize) -> PyResult<()> {
        detach(py, || self.store.write().unwrap_or_else(PoisonError::into_inner).truncate(len))?.map_err(refused)
    }

    /// An independent copy.
    fn fork(&self, py: Python<'_>) -> PyResult<Cache> {
        Ok(Cache { store: RwLock::new(self.read(py, Store::fork)?), engine: self.engine.clone() })
    }

    /// Key and value of a token in one head, as the cache holds them.
    fn get(&self, py: Python<'_>, token: usize, head: usize) -> PyResult<Option<[Vec<f32>; 2]>> {
        self.read(py, |store| store.get(token, head))
    }

    /// (tokens, bytes, bits per element).
    fn usage(&self, py: Python<'_>) -> PyResult<(usize, usize, f64)> {
        self.read(py, |store| (store.len(), store.size_bytes(), store.bits_per_element()))
    }

    /// Sizes and storage.
    fn spec(&self, py: Python<'_>) -> PyResult<Sizes> {
        let spec = self.read(py, |store| store.spec().clone())?;
        let sizes = [spec.heads, spec.head_dim, spec.value_dim, spec.capacity];
        Ok(match &spec.storage {
            Storage::Float(dtype) => (sizes, Some(dtype.name().into()), None),
            Storage::Packed { k, v } => (sizes, None, Some((numbers(k), numbers(v)))),
        })
    }
}

/// Bits of each head from calibration rows `[tokens, heads, dim]`: the `two` heads of the lowest priority get 2.
#[pyfunction]
pub fn head_bits(rows: &Bound<'_, PyAny>, two: usize) -> PyResult<Vec<u8>> {
    let array = Array::read("rows", rows)?;
    let mut claims = Claims::default();
    let view = array.view("rows", &mut claims)?;
    let [_, heads, dim] = view.shape()[..] else {
        return Err(wrong(format!("`rows` has shape {:?}, allowed: [tokens, heads, dim]", array.shape())));
    };
    if two > heads || heads == 0 || dim == 0 {
        return Err(wrong(format!("`two` is {two}, allowed: 0 to {heads}, the number of heads")));
    }
    let values: Vec<f32> = view.to_f64().into_iter().map(|x| x as f32).collect();
    Ok(numbers(&choose_bits(&values, heads, dim, two)))
}
