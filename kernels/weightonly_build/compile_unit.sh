#!/bin/sh
# Compiler launcher of the CUDA units: runs the compile command it is given and keeps what the compiler wrote to
# stderr in <object>.log. ptxas reports registers and spills there; the log must outlive the build, because an
# incremental build compiles (and reports) only the units that changed. Only other messages are shown.
# In /bin/sh and not Python, so that the command line, and with it ninja's and ccache's memory, is the same for
# every Python that drives the build.
set -u
object=
previous=
for argument in "$@"; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
# Depend mode: ccache hashes the headers a unit read instead of preprocessing it. nvcc preprocesses once per target,
# and a change under `#if __CUDA_ARCH__` of another target would go unseen.
# It takes -gencode for -g and would hash the current folder, for debug information that there is none of.
CCACHE_DEPEND=1
CCACHE_NOHASHDIR=1
export CCACHE_DEPEND CCACHE_NOHASHDIR
"$@" 2>"$object.log"
status=$?
grep -v '^ptxas info\|bytes stack frame' "$object.log" >&2
exit $status
