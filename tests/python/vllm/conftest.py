import os

# Two OpenMP teams share the cores of a test machine: neither may spin while the other computes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What a person set for serving must not decide what the tests see.
for name in [name for name in os.environ if name.startswith("KVTILE_VLLM")]:
    del os.environ[name]
