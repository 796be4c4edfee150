//! The net under every refactor: a committed hash of the text of each registered kernel, and of the kernels and launch
//! arguments of a matrix of problems (features x head dims x passes x tile configurations).
//!
//! A change that should leave kernels alone leaves `fingerprints.txt` alone. `cargo xtask fingerprints` names the kernels
//! that a change altered, `--update` accepts them, `--texts FOLDER` writes the texts so that two folders can be compared.
//! Rust source lines (`.file`, `.loc`) are not part of a text, so moving code changes nothing.

use fulgurite_core::cases::{self, Case};
use fulgurite_core::{BlockSpec, DType, Layout, Mask, Problem, ProblemBuilder, Rescale};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors as BackwardTensors};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::{
    ConfigTable, Copying, DeviceAux, DeviceBlockLists, DeviceTensor, ForwardConfig, ForwardPlan, Tensors, TileConfig,
};
use fulgurite_kernels::registry;
use fulgurite_ptx::device::{Launch, Span};
use fulgurite_ptx::{Arch, Kernel, Target};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the accepted hashes are kept.
fn kept() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fingerprints.txt")
}

/// FNV-1a of 64 bits: the same on every machine and for every compiler.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A kernel's text without the Rust lines that built it, and with its own name and those of its parameters replaced: names
/// may change, the order of parameters may not.
fn text_of(kernel: &Kernel) -> String {
    let mut kernel = kernel.clone();
    kernel.name = "kernel".into();
    kernel.params.iter_mut().enumerate().for_each(|(i, param)| param.name = format!("p{i}"));
    let source = |line: &&str| line.starts_with(".file ") || line.trim_start().starts_with(".loc ");
    kernel.ptx().lines().filter(|line| !source(line)).fold(String::new(), |all, line| all + line + "\n")
}

/// What one line of the file says: the kernels' texts, and the launches of a call.
struct Entry {
    texts: String,
    launches: String,
}

/// Multiprocessors of an H200.
const MULTIPROCESSORS: u32 = 132;

/// Device memory at addresses that never overlap.
struct Memory {
    end: u64,
}

impl Memory {
    fn span(&mut self, bytes: u64) -> Span {
        let address = self.end;
        self.end = (address + bytes.max(1)).next_multiple_of(256);
        Span::new(address, bytes)
    }

    /// A contiguous tensor of 16-bit elements.
    fn rows(&mut self, shape: [u64; 4]) -> DeviceTensor {
        DeviceTensor::packed(self.span(2 * shape.iter().product::<u64>()), shape)
    }
}

/// q, k, v and o of a problem, contiguous.
fn rows(memory: &mut Memory, problem: &Problem) -> [DeviceTensor; 4] {
    let (batch, q_len, k_len) = match problem.layout() {
        Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
        Layout::Packed(p) => (1, p.total_q, p.total_k),
    };
    let [heads, kv_heads] = [problem.q_heads(), problem.kv_heads()];
    let [d, dv] = [problem.head_dim(), problem.value_dim()];
    [[q_len, heads, d], [k_len, kv_heads, d], [k_len, kv_heads, dv], [q_len, heads, dv]]
        .map(|[len, heads, dim]| memory.rows([batch, len, heads, dim].map(|n| n as u64)))
}

/// Auxiliary tensors of a problem, contiguous.
fn aux(memory: &mut Memory, problem: &Problem) -> Vec<DeviceAux> {
    let place = |spec: &fulgurite_core::expr::AuxSpec| {
        let shape: Vec<u64> = spec.shape.iter().map(|&n| n as u64).collect();
        let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
        DeviceAux { span: memory.span(4 * shape.iter().product::<u64>()), strides }
    };
    problem.aux().iter().map(place).collect()
}

fn lists(memory: &mut Memory, spec: BlockSpec, q_len: usize) -> DeviceBlockLists {
    let rows = (spec.batch * spec.heads * q_len.div_ceil(spec.rows)) as u64;
    let mut pair = |bytes| [memory.span(bytes), memory.span(bytes)];
    DeviceBlockLists { counts: pair(4 * rows), blocks: pair(12 * rows), widths: [3, 3] }
}

/// Offsets of packed sequences and used lengths.
fn lengths(memory: &mut Memory, problem: &Problem) -> (Option<[Span; 2]>, [Option<Span>; 2]) {
    let batch = problem.batch() as u64;
    let packed = matches!(problem.layout(), Layout::Packed(_));
    let offsets = packed.then(|| [memory.span(4 * batch + 4), memory.span(4 * batch + 4)]);
    (offsets, [problem.has_used_q(), problem.has_used_k()].map(|used| used.then(|| memory.span(4 * batch))))
}

fn launch_text(launches: &[Launch]) -> String {
    launches.iter().fold(String::new(), |mut all, launch| {
        writeln!(all, "{:?} {:?}", launch.grid, launch.args).unwrap();
        all
    })
}

fn forward(plan: &ForwardPlan, problem: &Problem, target: Target) -> Entry {
    let kernel = Arc::new(plan.kernel(target).unwrap());
    let block_table = plan.block_table_kernel(target).unwrap().map(Arc::new);
    let expression = plan.expression_kernels(target).unwrap();
    let of_expression = expression.iter().flat_map(|kernels| kernels.all());
    let all = [&kernel].into_iter().chain(&block_table).chain(of_expression);
    let texts = all.map(|kernel| text_of(kernel)).collect();
    let mut memory = Memory { end: 4096 };
    let rows = rows(&mut memory, problem);
    let lse = memory.span(4 * (rows[0].shape[0] * rows[0].shape[1] * rows[0].shape[2]));
    let mut tensors = Tensors::new(rows, lse, memory.span(plan.counter_bytes()));
    tensors.scratch = Some(memory.span(plan.scratch_bytes()));
    tensors.sinks = problem.has_sinks().then(|| memory.span(4 * problem.q_heads() as u64));
    (tensors.cu_seqlens, tensors.used) = lengths(&mut memory, problem);
    tensors.aux = aux(&mut memory, problem);
    tensors.lists = problem.blocks().map(|spec| lists(&mut memory, spec, problem.max_q_len()));
    let mut launches: Vec<Launch> =
        block_table.iter().filter_map(|kernel| plan.block_table(kernel, &tensors)).collect();
    let of_expression = expression.iter().flat_map(|kernels| plan.expression_launches(kernels, &tensors).unwrap());
    launches.extend(of_expression);
    let ready = plan.clone().ready(kernel);
    match plan.copies(&tensors.rows) {
        None => launches.extend(ready.launch(&tensors, MULTIPROCESSORS).unwrap()),
        Some(copies) => {
            let copying = Copying::new(target).unwrap();
            let room = memory.span(copies.bytes());
            let plan = ready.with_copies(&copies, &copying, &tensors, room, MULTIPROCESSORS).unwrap();
            launches.extend(plan.launches);
        }
    }
    Entry { texts, launches: launch_text(&launches) }
}

fn backward(plan: &BackwardPlan, problem: &Problem, d_lse: bool, target: Target) -> Entry {
    let kernels = plan.kernels(target).unwrap();
    let texts = kernels.all().map(|kernel| text_of(kernel)).collect();
    let mut memory = Memory { end: 4096 };
    let all @ [q, k, v, o] = rows(&mut memory, problem);
    let lse_bytes = 4 * q.shape[0] * q.shape[1] * q.shape[2];
    let lse = memory.span(lse_bytes);
    let [d_o, d_q, d_k, d_v] = [o, q, k, v].map(|like| memory.rows(like.shape));
    let mut tensors = BackwardTensors::new(all, lse, d_o, [d_q, d_k, d_v]);
    tensors.d_lse = d_lse.then(|| memory.span(lse_bytes));
    let sinks = 4 * problem.q_heads() as u64;
    tensors.sinks = problem.has_sinks().then(|| [memory.span(sinks), memory.span(sinks)]);
    (tensors.cu_seqlens, tensors.used) = lengths(&mut memory, problem);
    tensors.aux = aux(&mut memory, problem);
    let wanted = problem.aux_gradients();
    tensors.d_aux = (problem.aux().iter().enumerate())
        .map(|(i, spec)| {
            wanted
                .iter()
                .any(|gradient| gradient.aux == i)
                .then(|| memory.span(4 * spec.shape.iter().product::<usize>() as u64))
        })
        .collect();
    tensors.lists = problem.blocks().map(|spec| lists(&mut memory, spec, problem.max_q_len()));
    let scratch = memory.span(plan.scratch_bytes());
    let launches = match plan.copies(&tensors) {
        None => plan.plan(&kernels, &tensors, scratch, MULTIPROCESSORS),
        Some(copies) => {
            let copying = Copying::new(Target::HOPPER).unwrap();
            let room = memory.span(copies.bytes());
            plan.with_copies((&copies, &copying, room), &kernels, &tensors, scratch, MULTIPROCESSORS)
        }
    };
    Entry { texts, launches: launch_text(&launches.unwrap().launches) }
}

/// All entries by name.
#[derive(Default)]
struct Net(BTreeMap<String, Entry>);

impl Net {
    fn add(&mut self, name: String, entry: Entry) {
        let before = self.0.insert(name.clone(), entry);
        assert!(before.is_none(), "two entries are called {name:?}");
    }

    fn forward(&mut self, name: &str, problem: &Problem, change: impl FnOnce(ForwardPlan) -> ForwardPlan) {
        // A problem that kernels do not have is not part of the net; that it is refused is tested elsewhere.
        let Ok(plan) = ForwardPlan::new(problem, None) else { return };
        self.add(format!("{name}: forward"), forward(&change(plan), problem, Target::HOPPER));
    }

    /// The kernel for GPUs without wgmma.
    fn mma_sync(&mut self, name: &str, problem: &Problem) {
        let Ok(plan) = ForwardPlan::mma_sync(problem, None, &ConfigTable::default()) else { return };
        self.add(format!("{name}: forward by mma.sync"), forward(&plan, problem, Target::AMPERE));
    }

    fn backward(&mut self, name: &str, problem: &Problem, d_lse: bool) {
        for order in [Order::Any, Order::Fixed] {
            let Ok(plan) = BackwardPlan::new(problem, d_lse, order) else { continue };
            self.add(format!("{name}: backward, {order:?}"), backward(&plan, problem, d_lse, Target::HOPPER));
        }
        let target = Target::AMPERE;
        if let Ok(plan) = BackwardPlan::mma_sync(problem, (d_lse, Order::Any), target.arch) {
            self.add(format!("{name}: backward by mma.sync"), backward(&plan, problem, d_lse, target));
        }
        let target = Target::new(Arch::SM_100A);
        if let Ok(plan) = BackwardPlan::tcgen05(problem, (d_lse, Order::Any), target.arch) {
            self.add(format!("{name}: backward by tcgen05"), backward(&plan, problem, d_lse, target));
        }
    }

    fn case(&mut self, name: &str, case: &Case) {
        self.forward(name, case.problem(), |plan| plan);
        self.mma_sync(name, case.problem());
        self.backward(name, case.problem(), case.d_lse().is_some());
    }

    fn registered(&mut self) {
        for entry in registry::all() {
            for target in [Target::HOPPER, Target::AMPERE] {
                let Ok(kernel) = (entry.build)(target) else { continue };
                let (texts, launches) = (text_of(&kernel), String::new());
                self.add(format!("registry {} {}", entry.name, target.name()), Entry { texts, launches });
            }
        }
    }

    /// The sizes that models have, where tile configurations, bands of heads, splits and rounding differ.
    fn sizes(&mut self) {
        let masks = [("full", Mask::none()), ("causal", Mask::causal()), ("window", Mask::window(Some(1024), Some(0)))];
        let dims = [[64, 64], [72, 72], [96, 96], [128, 128], [192, 128], [192, 192], [256, 256], [512, 512]];
        for ([d, dv], (mask_name, mask)) in dims.into_iter().flat_map(|d| masks.clone().map(|mask| (d, mask))) {
            for (batch, len, heads) in
                [(16, 1024, [16, 16]), (4, 4096, [16, 16]), (2, 5000, [32, 4]), (1, 16384, [8, 8])]
            {
                let problem = dense(batch, len, len, heads).head_dims(d, dv).mask(mask.clone()).build().unwrap();
                let name = format!("{batch} x {len}, heads {heads:?}, dims {d} {dv}, {mask_name}");
                self.forward(&name, &problem, |plan| plan);
                self.forward(&format!("{name}, no lse"), &problem, ForwardPlan::without_lse);
                self.mma_sync(&name, &problem);
                self.backward(&name, &problem, false);
            }
            let problem = dense(8, 1, 8192, [32, 8]).head_dims(d, dv).mask(mask.clone()).build().unwrap();
            self.forward(&format!("decode, dims {d} {dv}, {mask_name}"), &problem, |plan| plan);
        }
    }

    /// Masks whose expression alone gives blocks.
    fn expressions(&mut self) {
        for d in [64, 128, 256] {
            let problem = dense(2, 2048, 2048, [8, 2]).head_dim(d).mask(Mask::documents().and(Mask::causal()));
            for (name, builder) in [("", problem.clone()), (", used keys", problem.used_lengths(false, true))] {
                let (name, problem) = (format!("documents of 2 x 2048, dim {d}{name}"), builder.build().unwrap());
                self.forward(&name, &problem, |plan| plan);
                self.mma_sync(&name, &problem);
                self.backward(&name, &problem, false);
            }
        }
    }

    /// Configurations beside those of the table: every neighbour that has a kernel.
    fn configurations(&mut self) {
        for d in [64, 128, 256] {
            let problem = dense(4, 4096, 4096, [16, 16]).head_dim(d).mask(Mask::causal()).build().unwrap();
            let base: ForwardConfig = ConfigTable::default().find(d as u32, 4096);
            for config in base.neighbours(d as u32) {
                let plan = ForwardPlan::new(&problem, None).unwrap().with_config(|_| config);
                if plan.kernel(Target::HOPPER).is_ok() {
                    self.add(
                        format!("dim {d} causal config {config}: forward"),
                        forward(&plan, &problem, Target::HOPPER),
                    );
                }
            }
            for rescale in [Rescale::Always, Rescale::Lazy(8.0)] {
                let plan = ForwardPlan::new(&problem, Some(rescale)).unwrap();
                self.add(
                    format!("dim {d} causal rescale {rescale}: forward"),
                    forward(&plan, &problem, Target::HOPPER),
                );
            }
            let base: BackwardConfig = ConfigTable::default().find(d as u32, 4096);
            for config in base.neighbours(d as u32) {
                let plan = BackwardPlan::new(&problem, false, Order::Any).unwrap().with_config(config);
                if plan.kernels(Target::HOPPER).is_ok() {
                    let entry = backward(&plan, &problem, false, Target::HOPPER);
                    self.add(format!("dim {d} causal config {config}: backward"), entry);
                }
            }
        }
    }
}

fn dense(batch: usize, q_len: usize, k_len: usize, [heads, kv_heads]: [usize; 2]) -> ProblemBuilder {
    Problem::builder().dense(batch, q_len, k_len).heads(heads, kv_heads).dtype(DType::Bf16)
}

fn net() -> Net {
    let mut net = Net::default();
    net.registered();
    for dtype in [DType::Bf16, DType::F16] {
        // Cases of non-finite values have the kernels of the others.
        let finite = |case: &Case| !case.features.iter().any(|feature| cases::NONFINITE.contains(feature));
        for case in cases::cases(dtype).into_iter().filter(finite) {
            net.case(&format!("table {case}"), &case);
        }
    }
    for seed in 0..100 {
        let case = cases::random(seed, if seed % 2 == 0 { DType::Bf16 } else { DType::F16 });
        net.case(&format!("random {seed}"), &case);
    }
    net.sizes();
    net.configurations();
    net.expressions();
    net
}

/// Lines of the file, each with its name last: it may have spaces.
fn lines(net: &Net) -> BTreeMap<String, String> {
    let line = |entry: &Entry| format!("{:016x} {:016x}", hash(&entry.texts), hash(&entry.launches));
    net.0.iter().map(|(name, entry)| (name.clone(), line(entry))).collect()
}

fn read(text: &str) -> BTreeMap<String, String> {
    text.lines().filter_map(|line| Some((line.get(34..)?.to_owned(), line[..33].to_owned()))).collect()
}

#[test]
fn kernels_and_launches_are_those_that_were_accepted() {
    let net = net();
    assert!(net.0.len() > 500, "{}", net.0.len());
    if let Some(folder) = std::env::var_os("FULGURITE_TEXTS") {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, entry) in &net.0 {
            let file = Path::new(&folder).join(name.replace(['/', ' '], "_"));
            std::fs::write(file, format!("{}\n{}", entry.texts, entry.launches)).unwrap();
        }
    }
    let now = lines(&net);
    if std::env::var_os("UPDATE").is_some_and(|update| update == "1") {
        let all = now.iter().fold(String::new(), |all, (name, hashes)| all + hashes + " " + name + "\n");
        std::fs::write(kept(), all).unwrap();
    }
    let kept = read(&std::fs::read_to_string(kept()).unwrap_or_default());
    let names: std::collections::BTreeSet<&String> = now.keys().chain(kept.keys()).collect();
    let differs = |name: &&String| -> Option<String> {
        let what = match (kept.get(*name), now.get(*name)) {
            (Some(one), Some(other)) if one == other => return None,
            (Some(one), Some(other)) if one[..16] == other[..16] => "launches differ",
            (Some(_), Some(_)) => "text differs",
            (Some(_), None) => "is gone",
            _ => "is new",
        };
        Some(format!("{what}: {name}"))
    };
    let altered: Vec<String> = names.iter().filter_map(differs).collect();
    let count = altered.len();
    assert!(altered.is_empty(), "altered kernels: {count} of {}\n{}", now.len(), altered.join("\n"));
}

/// The check finds a change of one character and of one launch argument.
#[test]
fn a_changed_text_has_another_hash() {
    assert_ne!(hash("add.f32 a, b"), hash("add.f32 a, c"));
    assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
    let file = read("0123456789abcdef 0123456789abcdef a name: forward\n");
    assert_eq!(file["a name: forward"], "0123456789abcdef 0123456789abcdef");
}
