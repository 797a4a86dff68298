"""DeepSeek-V4.1's operators for GPUs, in Triton. Never run on a GPU: only in Triton's interpreter; compiled for sm_90, sm_100.

A module of operators needs Triton and PyTorch; this package imports without either. Launchers check what they are given, never
wait for the device, and never choose a path by what else is in the batch.

Law: every sum has one order, set by sizes of the model and of the row itself, so a row's bits do not depend on its neighbours.
"""
