"""The operations beside `gemm`. Each is a kernel on a GPU and plain PyTorch elsewhere, with the same results."""
