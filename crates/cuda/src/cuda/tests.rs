//! Tests of the device over a fake driver that records its calls: everything except the GPU.

use super::*;
use crate::fake::{self, Books, FAKE, MEMORY_BYTES, Seen, books};
use fulgurite_kernels::gemm::plan::{Gemm, Matrix};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_ptx::{Major, Number};

fn kernel(target: Target) -> Kernel {
    fulgurite_kernels::add::kernel(target).unwrap()
}

/// On a machine with a GPU this opens it; on one without, it returns an error and does not panic.
#[test]
fn a_missing_driver_is_reported() {
    match Cuda::open(0, Options::default()) {
        Ok(gpu) => assert!(gpu.multiprocessors() > 0),
        Err(DeviceError::Absent(why)) => {
            let known = ["was not found", "lacks", "does not start", "was asked for", "needed:"];
            assert!(known.iter().any(|part| why.contains(part)), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn targets_must_fit() {
    let older = Target { ptx: (7, 8), ..Target::HOPPER };
    assert_eq!(check_target(&kernel(Target::HOPPER), Target::HOPPER), Ok(()));
    assert_eq!(check_target(&kernel(Target::AMPERE), Target::AMPERE), Ok(()));
    assert_eq!(check_target(&kernel(Target::AMPERE), Target::HOPPER), Ok(()));
    let cases = [
        (
            Target::HOPPER,
            Target::AMPERE,
            "kernel `vector_add` is printed for sm_90a with PTX 8.0, and the device is sm_80 with PTX 9.0; \
             build it for the device's target",
        ),
        (
            Target::HOPPER,
            Target::named("sm_100a").unwrap(),
            "kernel `vector_add` is printed for sm_90a with PTX 8.0, and the device is sm_100a with PTX 9.0; \
             build it for the device's target",
        ),
        (
            Target::HOPPER,
            older,
            "kernel `vector_add` is printed for sm_90a with PTX 8.0, and the device is sm_90a with PTX 7.8; \
             build it for the device's target",
        ),
    ];
    for (own, device, want) in cases {
        assert_eq!(check_target(&kernel(own), device).unwrap_err().to_string(), want);
    }
}

#[test]
fn every_fact_about_the_compiler_counts() {
    let facts = Facts { name: "GPU".into(), capability: (9, 0), cuda: (13, 0), multiprocessors: 132 };
    let key = compiler_key(&facts, b"580.65");
    let others = [
        compiler_key(&Facts { name: "GPU 2".into(), ..facts.clone() }, b"580.65"),
        compiler_key(&Facts { capability: (9, 1), ..facts.clone() }, b"580.65"),
        compiler_key(&Facts { cuda: (13, 1), ..facts.clone() }, b"580.65"),
        compiler_key(&facts, b"580.82"),
    ];
    assert!(!others.contains(&key));
    assert_eq!(key, compiler_key(&facts, b"580.65"));
}

#[test]
fn the_compilers_words_come_first() {
    let failed = DeviceError::Failed { call: "cuLinkAddData_v2", what: "CUDA_ERROR_INVALID_PTX: bad".into() };
    let said = compile_error("gemm", failed.clone(), "ptxas fatal : no".into());
    assert_eq!(said.to_string(), "kernel `gemm` was not accepted: ptxas fatal : no");
    let silent = compile_error("gemm", failed, String::new());
    assert_eq!(silent.to_string(), "kernel `gemm` was not accepted: cuLinkAddData_v2: CUDA_ERROR_INVALID_PTX: bad");
}

#[test]
fn only_kernels_that_wait_may_overlap() {
    assert!(!waits_for_grid(&kernel(Target::HOPPER)));
    let waiting = Kernel::build("waiting", Target::HOPPER, |k| {
        k.threads(32, |w| w.wait_for_previous_grid());
    });
    assert!(waits_for_grid(&waiting.unwrap()));
}

/// The GPU of the fake driver.
fn fake_gpu(options: Options) -> Cuda {
    Cuda::open_by(&FAKE, 0, options).unwrap()
}

/// A folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("fulgurite-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Folder(folder)
    }
    fn options(&self) -> Options {
        Options { cache: Some(self.0.clone()), ..Options::default() }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn add() -> Arc<Kernel> {
    Arc::new(kernel(Target::HOPPER))
}

#[test]
fn the_gpu_is_described() {
    let gpu = fake_gpu(Options::default());
    assert_eq!((gpu.name().as_str(), gpu.target(), gpu.multiprocessors()), ("Fake GPU", Target::HOPPER, 132));
    assert_eq!((gpu.capability(), gpu.cuda_version()), ((9, 0), (13, 0)));
    let absent = Cuda::open_by(&FAKE, 1, Options::default()).err().unwrap();
    assert_eq!(
        absent.to_string(),
        "no device: GPU 1 was asked for, there are 1; count from 0, or check CUDA_VISIBLE_DEVICES"
    );
}

/// Contexts, memory and modules are released in whatever order they are dropped, and no context stays current.
#[test]
fn everything_is_given_back() {
    let gpu = fake_gpu(Options::default());
    let (buffer, module) = (gpu.allocate(100).unwrap(), gpu.load(add()).unwrap());
    let stream = gpu.own_stream().unwrap();
    let graph = gpu.capture(stream.stream(), || Ok(())).unwrap();
    gpu.replay(&graph, stream.stream()).unwrap();
    assert_eq!(gpu.time(stream.stream(), || Ok(())), Ok(1.5));
    drop(gpu);
    assert_eq!(books(|b| (b.contexts, b.memory.len(), b.modules, b.current)), (1, 1, 1, 0));
    drop((buffer, module, stream, graph));
    assert_eq!(books(|b| (b.contexts, b.memory.len(), b.modules, b.current)), (0, 0, 0, 0));
}

#[test]
fn bytes_go_there_and_back() {
    let gpu = fake_gpu(Options::default());
    let span = gpu.allocate(0).map(|buffer| buffer.span()).unwrap();
    assert_eq!(span.bytes(), 0);
    let buffer = gpu.allocate(100).unwrap();
    let sent: Vec<u8> = (0..100).collect();
    gpu.upload(buffer.span(), &sent).unwrap();
    let mut got = [0; 50];
    gpu.download(buffer.span().from(25), &mut got).unwrap();
    assert_eq!(got, sent[25..75]);
    gpu.upload(Span::new(1, 0), &[]).unwrap();

    let past = gpu.upload(buffer.span().from(96), &[0; 8]).unwrap_err();
    assert_eq!(past.to_string(), "8 bytes at offset 0 of a buffer of 4");
    // A span that claims more than was allocated.
    let wide = fake::memory(&gpu, buffer.span().address(), 1 << 40);
    let past = gpu.download(wide.from(60), &mut got).unwrap_err();
    assert_eq!(past.to_string(), "50 bytes at offset 60 of a buffer of 100");
    let nowhere = gpu.upload(fake::memory(&gpu, 1, 8), &[0; 8]).unwrap_err();
    assert_eq!(nowhere.to_string(), "cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_VALUE: invalid argument");
}

#[test]
fn too_much_memory_is_refused_and_work_goes_on() {
    let gpu = fake_gpu(Options::default());
    let asked = MEMORY_BYTES as u64 + 1;
    assert_eq!(
        gpu.allocate(asked).err().unwrap().to_string(),
        "out of device memory: 1048577 bytes were asked for, 1048576 are free; free some, or split the work"
    );
    gpu.allocate(8).unwrap();
}

#[test]
fn kernels_are_compiled_once() {
    let folder = Folder::new("once");
    books(|b| b.log = c"info : Used 168 registers\ninfo : 8 bytes spill stores, 4 bytes spill loads");
    let gpu = fake_gpu(folder.options());
    let first = gpu.load(add()).unwrap();
    let second = gpu.load(add()).unwrap();
    assert_eq!(books(|b| (b.compiled, b.modules)), (1, 1), "a loaded kernel is shared");
    drop((first, second));
    assert_eq!(books(|b| b.modules), 0);
    let again = fake_gpu(folder.options());
    let third = again.load(add()).unwrap();
    assert_eq!(books(|b| (b.compiled, b.modules)), (1, 1), "the folder has its code");
    let log = again.log(&third).unwrap();
    assert_eq!((log.registers, log.spill_store_bytes, log.spill_load_bytes), (Some(168), 8, 4));
    let without = fake_gpu(Options::default());
    without.load(add()).unwrap();
    assert_eq!(books(|b| b.compiled), 2, "no folder, no code");
}

#[test]
fn kept_code_that_does_not_load_is_compiled_again() {
    let folder = Folder::new("foreign");
    let gpu = fake_gpu(folder.options());
    let kernel = add();
    let key = gpu.compiler.part(kernel.ptx().as_bytes());
    Cache::new(folder.0.clone()).write(key, &Entry { log: String::new(), cubin: b"no code\0".to_vec() });
    gpu.load(kernel).unwrap();
    assert_eq!(books(|b| b.compiled), 1);
}

#[test]
fn a_linker_that_refuses_only_means_no_code_to_keep() {
    let folder = Folder::new("linker");
    books(|b| (b.no_linker, b.log) = (true, c"info : Used 90 registers"));
    let gpu = fake_gpu(folder.options());
    let module = gpu.load(add()).unwrap();
    assert_eq!(
        gpu.log(&module).unwrap().text,
        "info : Used 90 registers\nnot kept: cuLinkCreate_v2: CUDA_ERROR_INVALID_VALUE: invalid argument"
    );
    assert!(!folder.0.exists());
}

#[test]
fn slow_code_is_refused_unless_allowed() {
    let folder = Folder::new("slow");
    books(|b| b.log = c"info : Used 90 registers\n(C7510) Potential Performance Loss: wgmma is serialized");
    let gpu = fake_gpu(folder.options());
    let want = "kernel `vector_add` was not accepted: (C7510) Potential Performance Loss: wgmma is serialized";
    for round in ["compiled", "kept"] {
        assert_eq!(gpu.load(add()).err().unwrap().to_string(), want, "{round}");
    }
    let gpu = fake_gpu(Options { losses: Losses::Allow, ..folder.options() });
    let module = gpu.load(add()).unwrap();
    assert_eq!(gpu.log(&module).unwrap().losses.len(), 1);
    assert_eq!(books(|b| (b.compiled, b.modules)), (1, 1));
}

#[test]
fn a_text_that_is_refused_says_why() {
    books(|b| (b.no_compiler, b.log) = (true, c"ptxas fatal : Unresolved extern"));
    let error = fake_gpu(Options::default()).load(add()).err().unwrap();
    assert_eq!(error.to_string(), "kernel `vector_add` was not accepted: ptxas fatal : Unresolved extern");
    assert_eq!(books(|b| (b.modules, b.current)), (0, 0));
}

#[test]
fn a_launch_arrives_as_it_was_given() {
    let gpu = fake_gpu(Options::default());
    let module = gpu.load(add()).unwrap();
    books(|b| b.parameters = 4);
    let spans = [0x1000, 0x2000, 0x3000].map(|address| Value::Pointer(fake::memory(&gpu, address, 4000)));
    let args: Vec<Value> = spans.into_iter().chain([Value::U32(1000)]).collect();
    gpu.launch(&module, [4, 1, 1], &args, fake::stream(&gpu, 0x77)).unwrap();
    let first_word = |word: u64| {
        let mut words = [0; 9];
        words[0] = word;
        words
    };
    let want = Seen {
        blocks: [4, 1, 1],
        threads: 256,
        shared_bytes: 0,
        cluster: None,
        overlaps: false,
        args: [0x1000, 0x2000, 0x3000, 1000].map(first_word).into(),
        stream: 0x77,
        captured: false,
    };
    assert_eq!(books(|b| b.seen.pop()), Some(want));
    let error = gpu.launch(&module, [4, 1, 1], &args[..3], Stream::default()).unwrap_err();
    assert_eq!(error.to_string(), "kernel `vector_add` takes 4 arguments, 3 were given");
    assert!(books(|b| b.seen.is_empty()));
}

#[test]
fn tensors_and_shared_memory_are_announced() {
    let gpu = fake_gpu(Options::default());
    let layouts = Layouts { a: Major::Inner, b: Major::Inner };
    let gemm = Gemm { number: Number::Bf16, layouts, config: GemmConfig::default() };
    let kernel = Arc::new(gemm.kernel(gpu.target()).unwrap());
    let module = gpu.load(kernel.clone()).unwrap();
    let shared = sys_shared_attribute();
    assert_eq!(books(|b| b.attributes.clone()), [(shared, kernel.shared_bytes as i32)]);
    books(|b| b.parameters = 7);
    let matrix = |address| Matrix::packed(fake::memory(&gpu, address, 1 << 20), 64, 128, 2);
    let c = Matrix::packed(fake::memory(&gpu, 0x3000, 1 << 20), 64, 64, 2);
    let launch = gemm.launch(kernel.clone(), [matrix(0x1000), matrix(0x2000), c], gpu.multiprocessors()).unwrap();
    gpu.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
    let seen = books(|b| b.seen.pop()).unwrap();
    assert_eq!((seen.threads, seen.shared_bytes, seen.cluster), (kernel.threads, kernel.shared_bytes, None));
    // Type, address, extents, strides in bytes, the box's inner extent, swizzle.
    assert_eq!(seen.args[0], [9, 0x1000, 128, 64, 2, 256, 16384, 64, 3]);
    assert_eq!(seen.args[2], [9, 0x3000, 64, 64, 2, 128, 8192, 64, 3]);
    assert_eq!(seen.args[3..].iter().map(|words| words[0]).collect::<Vec<_>>(), [1, 1, 2, 2]);

    // Arguments that have not changed since the last launch are not encoded again; a rejected launch leaves nothing
    // behind.
    assert_eq!(books(|b| b.encoded), 3);
    gpu.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
    assert_eq!(books(|b| (b.encoded, b.seen.pop())), (3, Some(seen)));
    let moved = gemm.launch(kernel, [matrix(0x1000), matrix(0x4000), c], gpu.multiprocessors()).unwrap();
    gpu.launch(&module, moved.grid, &moved.args, Stream::default()).unwrap();
    assert_eq!(books(|b| (b.encoded, b.seen.pop().unwrap().args[1][1])), (4, 0x4000));
    assert!(gpu.launch(&module, [0, 0, 0], &moved.args, Stream::default()).is_err());
    gpu.launch(&module, moved.grid, &moved.args, Stream::default()).unwrap();
    assert_eq!(books(|b| (b.encoded, b.seen.pop().unwrap().args[0][1])), (7, 0x1000));
}

#[test]
fn a_kernel_without_parameters_has_its_grid_checked() {
    let gpu = fake_gpu(Options::default());
    let kernel = Kernel::build("nothing", Target::HOPPER, |k| k.threads(32, |w| w.sync_warp()));
    let module = gpu.load(Arc::new(kernel.unwrap())).unwrap();
    assert!(gpu.launch(&module, [0, 0, 0], &[], Stream::default()).is_err());
    gpu.launch(&module, [1, 1, 1], &[], Stream::default()).unwrap();
    assert!(gpu.launch(&module, [0, 0, 0], &[], Stream::default()).is_err());
}

/// The driver's attribute for the largest dynamic shared memory.
fn sys_shared_attribute() -> u32 {
    cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32
}

#[test]
fn clusters_and_overlap_are_announced() {
    let gpu = fake_gpu(Options::default());
    let kernel = Kernel::build("waiting", Target::HOPPER, |k| {
        k.cluster(2);
        k.threads(32, |w| w.wait_for_previous_grid());
    });
    let module = gpu.load(Arc::new(kernel.unwrap())).unwrap();
    gpu.launch(&module, [4, 1, 1], &[], Stream::default()).unwrap();
    let seen = books(|b| b.seen.pop()).unwrap();
    assert_eq!((seen.cluster, seen.overlaps), (Some(2), true));
}

/// Launching during a graph capture neither waits nor allocates.
#[test]
fn launches_can_be_recorded() {
    let gpu = fake_gpu(Options::default());
    // The first call may be a captured one.
    let (stream, mut module) = (gpu.own_stream().unwrap(), None);
    let compile = || gpu.load(add()).map(|loaded| module = Some(loaded));
    gpu.capture(stream.stream(), compile).unwrap();
    let module = module.unwrap();
    let span = Value::Pointer(fake::memory(&gpu, 0x1000, 4));
    let args = [span.clone(), span.clone(), span, Value::U32(1)];
    gpu.capture(stream.stream(), || gpu.launch(&module, [1, 1, 1], &args, stream.stream())).unwrap();
    assert_eq!(books(|b| b.memory.len()), 0);
    // A caller can still allocate memory during the capture, and have it zeroed.
    gpu.capture(stream.stream(), || {
        let zeros = gpu.zeroed(64)?;
        assert!(books(|b| b.memory[&zeros.span().address()].iter().all(|&byte| byte == 0)));
        Ok(())
    })
    .unwrap();
    gpu.capture(stream.stream(), || gpu.allocate(64).map(drop)).unwrap();
    assert_eq!(books(|b| b.memory.len()), 0);
    let spoilt = gpu.capture(stream.stream(), || gpu.synchronize(stream.stream())).err().unwrap();
    assert_eq!(spoilt.to_string(), "cuStreamSynchronize: CUDA_ERROR_INVALID_VALUE: invalid argument");
    gpu.synchronize(stream.stream()).unwrap();
}

/// Memory that a capture keeps is freed when the graph is gone and another call is made, not before.
#[test]
fn recordings_keep_what_they_need() {
    let gpu = fake_gpu(Options::default());
    let stream = gpu.own_stream().unwrap();
    assert_eq!(gpu.capture_id(stream.stream()), Ok(None));
    let unrecorded = gpu.keep_for_replays(stream.stream(), Box::new(())).unwrap_err();
    assert_eq!(unrecorded.to_string(), "keep: the stream is not being recorded");
    let record = || {
        let mut number = None;
        let graph = gpu.capture(stream.stream(), || {
            number = gpu.capture_id(stream.stream())?;
            gpu.keep_for_replays(stream.stream(), Box::new(gpu.allocate(64)?))
        });
        (number.unwrap(), graph.unwrap())
    };
    let (first, graph) = record();
    gpu.replay(&graph, stream.stream()).unwrap();
    assert_eq!((gpu.capture_id(stream.stream()), books(|b| b.memory.len())), (Ok(None), 1));
    drop(graph);
    assert_eq!(books(|b| b.memory.len()), 1, "the driver's callback calls nothing");
    let (second, graph) = record();
    assert_eq!((first != second, books(|b| b.memory.len())), (true, 1));
    drop(graph);
    let refused = |how: fn(&mut Books)| {
        let call = || {
            books(how);
            gpu.capture_id(stream.stream())?;
            gpu.keep_for_replays(stream.stream(), Box::new(gpu.allocate(64)?))
        };
        let error = gpu.capture(stream.stream(), call).err().unwrap();
        books(|b| (b.spoilt, b.no_retention) = (false, false));
        error.to_string()
    };
    assert_eq!(
        refused(|b| b.spoilt = true),
        "recording: an earlier error spoilt the recording of this stream; end it and record again"
    );
    assert_eq!(
        refused(|b| b.no_retention = true),
        "cuGraphRetainUserObject: CUDA_ERROR_INVALID_VALUE: invalid argument"
    );
    gpu.capture_id(stream.stream()).unwrap();
    assert_eq!(books(|b| b.memory.len()), 0, "what no graph keeps is dropped");
    let (_, graph) = record();
    // No device is left to drop the value, so it stays until the process ends.
    drop(gpu);
    drop(graph);
    assert_eq!(books(|b| b.memory.len()), 1);
}

#[test]
fn another_devices_module_is_refused() {
    let gpu = fake_gpu(Options::default());
    let foreign = Module::new(add(), Arc::new("another device's"));
    assert!(gpu.log(&foreign).is_none());
    let error = gpu.launch(&foreign, [1, 1, 1], &[], Stream::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "launch: the module of `vector_add` is another device's; load the kernel on this one"
    );
}

/// Memory of no device, memory of another device, freed memory, and streams of another device are all rejected before
/// anything is launched.
#[test]
fn memory_and_streams_of_others_are_refused() {
    let (gpu, other) = (fake_gpu(Options::default()), fake_gpu(Options::default()));
    let module = gpu.load(add()).unwrap();
    books(|b| b.parameters = 4);
    let [x, y, z] = [4, 4, 4].map(|bytes| gpu.allocate(bytes).unwrap());
    let launch = |span: Span, stream: Stream<'_>| {
        let args = [x.span(), y.span(), span].map(Value::Pointer).into_iter().chain([Value::U32(1)]);
        gpu.launch(&module, [1, 1, 1], &args.collect::<Vec<_>>(), stream)
    };
    let freed = z.span();
    assert_eq!(launch(freed, Stream::default()), Ok(()));
    drop(z);
    let theirs = other.allocate(4).unwrap();
    for span in [freed, theirs.span(), Span::new(x.span().address(), 4)] {
        let error = launch(span, Stream::default()).unwrap_err();
        assert_eq!(error, DeviceError::Foreign { address: span.address() });
        assert!(gpu.upload(span, &[0; 4]).is_err() && gpu.download(span, &mut [0; 4]).is_err());
    }
    let stream = other.own_stream().unwrap();
    assert_eq!(launch(y.span(), stream.stream()), Err(DeviceError::Stream));
    assert_eq!(gpu.synchronize(stream.stream()), Err(DeviceError::Stream));
    assert_eq!(books(|b| b.seen.len()), 1);
    // Freed memory is noticed although the launch equals the previous one.
    let w = gpu.allocate(4).unwrap();
    launch(w.span(), Stream::default()).unwrap();
    let again = w.span();
    drop(w);
    assert!(launch(again, Stream::default()).is_err());
}

#[test]
fn a_graph_whose_memory_was_freed_is_not_replayed() {
    let gpu = fake_gpu(Options::default());
    books(|b| b.parameters = 4);
    let (stream, buffer, module) = (gpu.own_stream().unwrap(), gpu.allocate(4).unwrap(), gpu.load(add()).unwrap());
    let span = Value::Pointer(buffer.span());
    let args = [span.clone(), span.clone(), span, Value::U32(1)];
    let graph = gpu.capture(stream.stream(), || gpu.launch(&module, [1, 1, 1], &args, stream.stream())).unwrap();
    drop(module);
    assert_eq!(books(|b| b.modules), 1, "the graph holds its kernel");
    gpu.replay(&graph, stream.stream()).unwrap();
    drop(buffer);
    let refused = gpu.replay(&graph, stream.stream()).unwrap_err().to_string();
    assert_eq!(refused, "replay: memory that the graph's launches use was freed; capture the launches again");
    drop(graph);
    assert_eq!(books(|b| b.modules), 0);
}
