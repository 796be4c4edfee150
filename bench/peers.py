"""The peers, each called in the layout and with the settings that suit it best.

Inputs are NumPy arrays `[batch, sequence, heads, head_dim]`, results too. Everything that can be prepared is:
sessions, layouts and output buffers exist before the clock starts.
"""

import numpy as np
from race import Contender


def heads_first(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def torch_forward(q, k, v, causal, dtype="float32"):
    """PyTorch's SDPA: its flash kernel for CPUs, `[batch, heads, sequence, head_dim]`."""
    import torch

    tensors = [torch.from_numpy(heads_first(x)).to(getattr(torch, dtype)) for x in (q, k, v)]

    def call():
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    def result():
        with torch.no_grad():
            o = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        return [o.float().numpy().transpose(0, 2, 1, 3)]

    return Contender("torch", call, result)


def torch_backward(q, k, v, d_o, causal, dtype="float32"):
    """PyTorch's backward alone; gradients start from none each time."""
    import torch

    dtype = getattr(torch, dtype)
    tensors = [torch.from_numpy(heads_first(x)).to(dtype).requires_grad_() for x in (q, k, v)]
    gradient = torch.from_numpy(heads_first(d_o)).to(dtype)
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    def call():
        for tensor in tensors:
            tensor.grad = None
        out.backward(gradient, retain_graph=True)

    def result():
        call()
        return [tensor.grad.float().numpy().transpose(0, 2, 1, 3) for tensor in tensors]

    return Contender("torch", call, result)


def onnxruntime_forward(q, k, v, causal, threads, grouped=False):
    """ONNX Runtime's MultiHeadAttention, or its GroupQueryAttention, which is always causal."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    batch, seq, heads, dim = q.shape
    arrays = {name: x.reshape(batch, seq, heads * dim) for name, x in (("q", q), ("k", k), ("v", v))}
    info = lambda name, kind, shape: helper.make_tensor_value_info(name, kind, shape)
    inputs = [info(name, TensorProto.FLOAT, list(x.shape)) for name, x in arrays.items()]
    outputs = {"o": np.empty_like(arrays["q"])}
    if grouped:
        assert causal
        arrays["seqlens"] = np.full(batch, seq - 1, np.int32)
        arrays["total"] = np.array([seq], np.int32)
        inputs += [info("seqlens", TensorProto.INT32, [batch]), info("total", TensorProto.INT32, [1])]
        outputs |= {name: np.empty((batch, heads, seq, dim), np.float32) for name in ("present_k", "present_v")}
        names, kind = ["q", "k", "v", "", "", "seqlens", "total"], "GroupQueryAttention"
        attributes = dict(num_heads=heads, kv_num_heads=heads)
    else:
        names, kind = ["q", "k", "v"], "MultiHeadAttention"
        attributes = dict(num_heads=heads, unidirectional=int(causal))
    node = helper.make_node(kind, names, list(outputs), domain="com.microsoft", **attributes)
    results = [info(name, TensorProto.FLOAT, list(x.shape)) for name, x in outputs.items()]
    graph = helper.make_graph([node], "attention", inputs, results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.force_spinning_stop", "1")  # between calls: others run then
    session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in arrays.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x))
    for name, x in outputs.items():
        binding.bind_output(name, "cpu", 0, np.float32, x.shape, x.ctypes.data)

    def call():
        session.run_with_iobinding(binding)

    def result():
        call()
        return [outputs["o"].reshape(batch, seq, heads, dim)]

    contender = Contender("onnxruntime GQA" if grouped else "onnxruntime MHA", call, result)
    contender.keep = arrays, outputs, onnx  # the binding holds bare pointers
    return contender


def openvino_forward(q, k, v, causal, threads, dtype="f32"):
    """OpenVINO's scaled dot product attention (opset 13), compiled for latency, `[batch, heads, sequence, dim]`."""
    import openvino as ov
    import openvino.opset13 as ops

    arrays = [heads_first(x) for x in (q, k, v)]
    kind = {"f32": ov.Type.f32, "bf16": ov.Type.bf16}[dtype]
    parameters = [ops.parameter(list(x.shape), kind) for x in arrays]
    node = ops.scaled_dot_product_attention(*parameters, causal=causal)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": dtype,
    }
    request = ov.Core().compile_model(ov.Model([node], parameters), "CPU", settings).create_infer_request()
    for number, x in enumerate(arrays[:3]):
        if dtype == "bf16":
            # Rounded to the upper halves of f32, ties away: the tolerance does not see the difference.
            words = ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
            arrays.append(words)
            request.set_input_tensor(number, ov.Tensor(words, list(x.shape), kind))
        else:
            request.set_input_tensor(number, ov.Tensor(x, shared_memory=True))

    def result():
        request.infer()
        o = np.array(request.get_output_tensor(0).data)
        if dtype == "bf16":
            o = (o.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return [o.transpose(0, 2, 1, 3)]

    contender = Contender("openvino", lambda: request.infer() and None, result)
    contender.keep = arrays
    return contender


def torch_matmul(size):
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    c = torch.empty(size, size)
    contender = Contender(f"torch matmul {size}", lambda: torch.mm(a, b, out=c) is None or None)
    contender.flops = 2 * size**3
    return contender


def versions():
    import importlib.metadata as metadata

    found = {}
    for name in ("numpy", "torch", "onnxruntime", "openvino"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
