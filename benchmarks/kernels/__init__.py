"""Time, memory and error of the losses over the vocabulary, beside other implementations and the machine's floor.

    python -m benchmarks.kernels [--device cuda] [--suite NAME ...] [--peer-python PYTHON] [--out JSON] [--plot SVG]

Peers as released need an environment of their own, in which all providers then run:

    python -m venv peers && peers/bin/pip install torch==2.13.0 triton==3.6.0 numpy jaxtyping
    peers/bin/pip install --no-deps liger-kernel==0.8.5

* Every provider runs in a fresh process, the rounds interleaved. A row has the least, median and interquartile range of the
  wall time of a call (forward and backward, or forward alone for `gather`), the CPU seconds beside it (on a busy machine
  below the number of threads times the wall time), and the first call apart, which compiles where a provider does so.
* Memory is what a call takes beyond its inputs, with the gradients and net of them. CPU: the peak of the resident size while
  the call runs, less the size before it; it is that of the second call, because a compiler works in the first (JSON has
  both). CUDA: the same of the allocator's bytes.
* Errors are those of the same call on 16 rows spread over the batch, against float64 from the same inputs: the loss relative
  to itself (`gather`: the largest difference in nats), gradients relative to their largest entry. These rows of the first
  gradient in the full call count, too. The reference rounds a head's logits once to the type of the head, which is what
  every provider has them in.
* floor_s = FLOP / GEMM rate + max(bytes / copy bandwidth, exponentials / exp rate), with ceilings measured in the same run:
  a large copy (bytes read and written), the faster of two matrix products in the case's type, and on a CPU the faster of
  `exp` and `softmax` of an array in cache. FLOP: 2 N V (H + H_teacher), 2 N V H more for the gradient of the hidden states,
  and again for that of a head that is trained. Bytes: inputs read once and gradients written once; on CUDA given logits are
  read again for the gradient, for a row of two models does not fit on a multiprocessor; a head's logits would not leave the
  chip. Exponentials: one a logit. N counts rows that are not masked. The ceilings are torch's own: compiled code may take
  exponentials faster.

Nothing is left out of the table: a provider that fails has its error in its row.
"""
