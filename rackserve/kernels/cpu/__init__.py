"""Kernels for CPUs: one C++ source, built for several instruction sets, called through a plain C interface.

Where none was built (no compiler at installation) `library.find` says so and models compute with torch instead.
"""
