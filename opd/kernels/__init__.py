"""The memory-bound maths over the vocabulary: Triton kernels on CUDA, and their torch twins, in blocks of rows that stay in
cache, everywhere else."""

from opd.kernels.divergence import forward_kl as forward_kl
from opd.kernels.divergence import jsd as jsd
from opd.kernels.divergence import reverse_kl as reverse_kl
from opd.kernels.gather import gather_logprob as gather_logprob
from opd.kernels.head import LogitForm as LogitForm
from opd.kernels.head import OutputHead as OutputHead
from opd.kernels.linear import TeacherSampled as TeacherSampled
from opd.kernels.linear import TeacherStates as TeacherStates
from opd.kernels.linear import TeacherTopK as TeacherTopK
from opd.kernels.linear import linear_gather_logprob as linear_gather_logprob
from opd.kernels.linear import linear_reverse_kl as linear_reverse_kl
from opd.kernels.topk import topk_reverse_kl as topk_reverse_kl
