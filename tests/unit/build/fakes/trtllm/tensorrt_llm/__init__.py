"""TensorRT-LLM 1.2.1 as far as ``trtx build --backend tensorrt`` calls it; refuses every other name."""
