"""A TFLite file written by hand, without the converter."""

import flatbuffers
from ai_edge_litert import schema_py_generated as schema


def small_file() -> bytes:
    """Return the file of ``y = x + constant``, with one element of every kind that is checked."""
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.description = 3, "a small one"
    model.buffers = [schema.BufferT(), schema.BufferT(data=list(range(8)))]
    model.operatorCodes = [schema.OperatorCodeT(version=1)]
    quantization = schema.QuantizationParametersT(scale=[0.5], zeroPoint=[0])
    graph.tensors = [
        schema.TensorT(shape=[2], buffer=int(name == "constant"), name=name, quantization=quantization)
        for name in ("x", "constant", "y")
    ]
    graph.inputs, graph.outputs = [0], [2]
    options = schema.AddOptionsT()
    graph.operators = [
        schema.OperatorT(
            inputs=[0, 1], outputs=[2], builtinOptionsType=schema.BuiltinOptions.AddOptions, builtinOptions=options
        )
    ]
    model.subgraphs = [graph]
    ports = [[schema.TensorMapT(name=name, tensorIndex=index)] for name, index in (("x", 0), ("y", 2))]
    model.signatureDefs = [schema.SignatureDefT(inputs=ports[0], outputs=ports[1], signatureKey="add")]
    builder = flatbuffers.Builder(64)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
