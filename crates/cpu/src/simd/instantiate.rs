//! Instantiates the generic kernels as entry points of one instruction set.

/// Compiles the generic kernels for one instruction set. The list gives, for each width of a block in
/// vectors, the rows whose accumulators fill the register file.
macro_rules! define_kernels {
    ($simd:ident, [$($feature:meta)?], [$(($vectors:literal, $rows:literal)),*]) => {
        pub(super) static KERNELS: super::Kernels = TABLE;
        pub(super) const TABLE: super::Kernels = {
            use crate::simd::algorithms as alg;
            use crate::simd::Prefetch;
            use crate::simd::algorithms::{RowSets, SimdElement};
            use half::{bf16, f16};

            #[inline(always)]
            unsafe fn product<const TRANSPOSED: bool>(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, [m, n, k]: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                let mut at = 0;
                while at < n {
                    let vectors = ((n - at) / $simd::LANES).min($simd::VECTORS);
                    // SAFETY: the caller's extents cover columns at .. at + vectors.
                    unsafe {
                        let (c, b) = (c.add(at), b.add(at));
                        match vectors {
                            $($vectors => alg::block::<$simd, $rows, $vectors, TRANSPOSED>(c, ldc, a, lda, b, ldb, m, k, add, ahead),)*
                            _ => unreachable!("bug in fulgurite: a block of no width"),
                        }
                    }
                    at += vectors * $simd::LANES;
                }
            }

            $(#[$feature])?
            unsafe fn gemm(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, size: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                // SAFETY: passed on.
                unsafe { product::<false>(c, ldc, a, lda, b, ldb, size, add, ahead) }
            }
            $(#[$feature])?
            unsafe fn gemm_transposed(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, size: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                // SAFETY: passed on.
                unsafe { product::<true>(c, ldc, a, lda, b, ldb, size, add, ahead) }
            }
            $(#[$feature])?
            unsafe fn softmax(args: &mut alg::SoftmaxArgs<'_>, probe: Option<&mut alg::LaneProbe<'_>>) -> alg::SoftmaxStats {
                // SAFETY: passed on.
                unsafe { alg::softmax::<$simd>(args, probe) }
            }
            $(#[$feature])?
            unsafe fn grad(args: &mut alg::GradArgs<'_>) {
                // SAFETY: passed on.
                unsafe { alg::grad::<$simd>(args) }
            }
            $(#[$feature])?
            unsafe fn scale_lanes(x: *mut f32, rows: usize, stride: usize, factor: *const f32) {
                // SAFETY: passed on.
                unsafe { alg::scale_lanes::<$simd>(x, rows, stride, factor) }
            }
            $(#[$feature])?
            unsafe fn transpose(src: *const f32, ss: usize, dst: *mut f32, ds: usize, rows: usize, cols: usize) {
                // SAFETY: passed on.
                unsafe { alg::transpose::<$simd>(src, ss, dst, ds, rows, cols) }
            }
            $(#[$feature])?
            unsafe fn widen<T: SimdElement>(src: *const T, dst: *mut f32, n: usize) -> bool {
                // SAFETY: passed on.
                unsafe { alg::widen::<$simd, T>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn narrow_f16(src: *const f32, dst: *mut f16, n: usize) {
                // SAFETY: passed on.
                unsafe { alg::narrow_f16::<$simd>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
                alg::narrow_bf16(src, dst)
            }
            $(#[$feature])?
            unsafe fn stream(src: *const f32, dst: *mut f32, n: usize) {
                // SAFETY: passed on.
                unsafe { alg::stream::<$simd>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn fence() {
                // SAFETY: passed on.
                unsafe { $simd::fence() }
            }
            /// Rows four at a time (else one by one, or one of each pair), and as many keys as one transpose can take.
            $(#[$feature])?
            unsafe fn dots<T: SimdElement>(
                rows: RowSets, [stride, ldq]: [usize; 2], k: *const T, row: usize, [n, keys, d]: [usize; 3], mut prefetch: Prefetch,
            ) {
                const BY_FOUR: usize = $simd::LANES / 4;
                const BY_ONE: usize = $simd::LANES;
                const BY_TWO: usize = $simd::LANES / 2;
                let mut r = 0;
                while r < n {
                    let four = n - r >= 4;
                    let most = if four { BY_FOUR } else { BY_ONE };
                    let mut j = 0;
                    while j < keys {
                        let many = keys - j >= most;
                        // SAFETY: rows r .. r + 4 or r + 1 and keys j .. j + most or j + 1 are inside.
                        unsafe {
                            let (s, q) = (rows.out.map(|s| s.wrapping_add(j * stride + r)), rows.by.map(|q| q.wrapping_add(r * ldq)));
                            let k = k.add(j * row);
                            if !four && many && rows.both {
                                // The keys that one row alone takes at once, so that sums are the same.
                                for half in 0..2 {
                                    let s = s.map(|s| s.add(half * BY_TWO * stride));
                                    alg::dots::<$simd, T, 2, BY_TWO>(s, stride, q, k.add(half * BY_TWO * row), row, d, &mut prefetch);
                                }
                            } else {
                                for i in 0..if rows.both { 2 } else { 1 } {
                                    let fours = |p: *mut f32| [0, 1, 2, 3].map(|r| p.wrapping_add(r));
                                    let (s, s4, q) = (s[i], fours(s[i]), q[i]);
                                    let q4 = [0, 1, 2, 3].map(|r| q.wrapping_add(r * ldq));
                                    // The second of a pair reads what the first has read.
                                    let mut nothing = Prefetch::NOTHING;
                                    let prefetch = if i == 0 { &mut prefetch } else { &mut nothing };
                                    match (four, many) {
                                        (true, true) => alg::dots::<$simd, T, 4, BY_FOUR>(s4, stride, q4, k, row, d, prefetch),
                                        (true, false) => alg::dots::<$simd, T, 4, 1>(s4, stride, q4, k, row, d, prefetch),
                                        (false, true) => alg::dots::<$simd, T, 1, BY_ONE>([s], stride, [q], k, row, d, prefetch),
                                        (false, false) => alg::dots::<$simd, T, 1, 1>([s], stride, [q], k, row, d, prefetch),
                                    }
                                }
                            }
                        }
                        j += if many { most } else { 1 };
                    }
                    r += if four { 4 } else { 1 };
                }
            }
            /// Rows four at a time, columns four vectors at a time, the last columns one by one.
            $(#[$feature])?
            unsafe fn combine<T: SimdElement>(
                rows: RowSets, [stride, ldo]: [usize; 2], v: *const T, row: usize, [n, keys, d]: [usize; 3], mut prefetch: Prefetch,
            ) {
                let both = if rows.both { 2 } else { 1 };
                let mut r = 0;
                while r < n {
                    let four = n - r >= 4;
                    let mut c = 0;
                    while c < d {
                        let wide = d - c >= 4 * $simd::LANES;
                        // SAFETY: rows r .. r + 4 or r + 1 and the columns of each arm are inside.
                        unsafe {
                            let (o, p) = (rows.out.map(|o| o.wrapping_add(r * ldo + c)), rows.by.map(|p| p.wrapping_add(r)));
                            let v = v.add(c);
                            if d - c < $simd::LANES {
                                for (x, i, which) in (0..d - c).flat_map(|x| (0..if four { 4 } else { 1 }).flat_map(move |i| (0..both).map(move |w| (x, i, w)))) {
                                    let to = o[which].add(i * ldo + x);
                                    for j in 0..keys {
                                        *to += *p[which].add(j * stride + i) * (*v.add(j * row + x)).one();
                                    }
                                }
                                break;
                            }
                            if rows.both && !four {
                                if wide {
                                    alg::combine::<$simd, T, 2, 4>(o, p, stride, v, row, keys, &mut prefetch);
                                } else {
                                    alg::combine::<$simd, T, 2, 1>(o, p, stride, v, row, keys, &mut prefetch);
                                }
                            } else {
                                for i in 0..both {
                                    let (o, o4) = (o[i], [0, 1, 2, 3].map(|r| o[i].wrapping_add(r * ldo)));
                                    let (p, p4) = (p[i], [0, 1, 2, 3].map(|r| p[i].wrapping_add(r)));
                                    let mut nothing = Prefetch::NOTHING;
                                    let prefetch = if i == 0 { &mut prefetch } else { &mut nothing };
                                    match (four, wide) {
                                        (true, true) => alg::combine::<$simd, T, 4, 4>(o4, p4, stride, v, row, keys, prefetch),
                                        (true, false) => alg::combine::<$simd, T, 4, 1>(o4, p4, stride, v, row, keys, prefetch),
                                        (false, true) => alg::combine::<$simd, T, 1, 4>([o], [p], stride, v, row, keys, prefetch),
                                        (false, false) => alg::combine::<$simd, T, 1, 1>([o], [p], stride, v, row, keys, prefetch),
                                    }
                                }
                            }
                        }
                        c += if wide { 4 * $simd::LANES } else { $simd::LANES };
                    }
                    r += if four { 4 } else { 1 };
                }
            }
            $(#[$feature])?
            unsafe fn evaluate(evaluator: &mut crate::evaluate::Evaluator<'_>, at: &crate::evaluate::Cells) {
                // SAFETY: passed on.
                unsafe { evaluator.run::<$simd>(at) }
            }
            $(#[$feature])?
            unsafe fn words(evaluator: &crate::evaluate::Evaluator<'_>, at: &crate::evaluate::Cells, out: &mut [u64]) {
                // SAFETY: passed on.
                unsafe { evaluator.words::<$simd>(at, out) }
            }
            $(#[$feature])?
            unsafe fn hide(s: alg::Plane<*mut f32>, words: &[u64], first: usize, lanes: usize) {
                // SAFETY: passed on.
                unsafe { alg::hide::<$simd>(s, words, first, lanes) }
            }
            $(#[$feature])?
            unsafe fn finish(m: &[f32], l: &[f32], inverse: &mut [f32], lse: &mut [f32]) {
                crate::functions::finish(m, l, inverse, lse)
            }
            $(#[$feature])?
            unsafe fn lane_dots(a: *const f32, b: *const f32, rows: usize, stride: usize, out: *mut f32) {
                // SAFETY: passed on.
                unsafe { alg::lane_dots::<$simd>(a, b, rows, stride, out) }
            }
            $(#[$feature])?
            unsafe fn stage(stage: &mut alg::Stage<'_>) {
                // SAFETY: passed on.
                unsafe { alg::stage::<$simd>(stage) }
            }

            $(#[$feature])?
            unsafe fn round_weights(
                p: &mut [f32], stride: usize, lane: usize, range: (usize, usize), format: fulgurite_core::format::GroupFormat,
            ) {
                alg::round_weights::<{ $simd::LANES }>(p, stride, lane, range, format)
            }

            $(#[$feature])?
            unsafe fn round_rows(x: &mut [f32], cols: usize, format: fulgurite_core::format::GroupFormat) {
                alg::round_rows(x, cols, format)
            }
            $(#[$feature])?
            unsafe fn expand(from: &fulgurite_core::format::Grouped, row: usize, first: usize, out: &mut [f32]) {
                alg::expand(from, row, first, out)
            }

            super::Kernels {
                lanes: $simd::LANES,
                tile: $simd::LANES * $simd::VECTORS,
                gemm,
                gemm_transposed,
                softmax,
                grad,
                scale_lanes,
                transpose,
                widen_f32: widen::<f32>,
                widen_f16: widen::<f16>,
                widen_bf16: widen::<bf16>,
                narrow_f16,
                narrow_bf16,
                stream,
                fence,
                dots_f32: dots::<f32>,
                dots_f16: dots::<f16>,
                dots_bf16: dots::<bf16>,
                combine_f32: combine::<f32>,
                combine_f16: combine::<f16>,
                combine_bf16: combine::<bf16>,
                evaluate,
                words,
                hide,
                finish,
                lane_dots,
                best_keys: super::best_keys::define_best_keys!($simd, [$($feature)?]),
                bands: super::band::define_bands!($simd, [$($feature)?], [$(($vectors, $rows)),*]),
                stage,
                round_weights,
                round_rows,
                expand,
                matrix: None,
                pairs: None,
            }
        };
    };
}
pub(super) use define_kernels;
