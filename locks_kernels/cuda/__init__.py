"""The LOCKS step in CUDA C++, compiled at run time by NVRTC: score, select, attend, build, append + finalise."""
