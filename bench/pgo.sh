#!/bin/sh
# Builds target/pgo/blockyard: the profile `dist`, optimized for what the program does in the benchmarks
# (profile-guided optimization). Two builds of the program with a run of benchmarks between them.
set -eu
cd "$(dirname "$0")/.."
target=target/pgo
host=$(rustc -vV | sed -n 's/^host: //p')
profdata=$(rustc --print sysroot)/lib/rustlib/$host/bin/llvm-profdata
[ -x "$profdata" ] || { echo "pgo: this toolchain has no llvm-profdata: rustup component add llvm-tools" >&2; exit 1; }

# With --target, so that build scripts and procedural macros are not instrumented.
build() {
  RUSTFLAGS="${RUSTFLAGS:-} $1" cargo build --locked --profile dist --package blockyard --bin blockyard \
    --target "$host" --target-dir "$target"
}
bench() {
  program=$1
  shift
  cargo run --locked --release --quiet --manifest-path bench/Cargo.toml --bin "$program" -- \
    --blockyard "$target/instrumented" --repetitions 1 "$@" >/dev/null
}

rm -rf "$target/profiles"
mkdir -p "$target/profiles"
profiles=$(cd "$target/profiles" && pwd)
echo "pgo: 1 of 3, the instrumented program"
build "-Cprofile-generate=$profiles"
cp "$target/$host/dist/blockyard" "$target/instrumented"

# A gateway without KV events, with them, and with a tokenizer; streams of the native engine; all tiers.
echo "pgo: 2 of 3, benchmarks, five minutes"
cargo build --locked --release --manifest-path bench/Cargo.toml
export LLVM_PROFILE_FILE="$profiles/%m.profraw"
bench gateway --only blockyard --only blockyard-events --only blockyard-tokenizer --seconds 2 \
  --measure plain --measure stream --measure paced --measure single --measure long
bench stream
bench ttft
unset LLVM_PROFILE_FILE
"$profdata" merge --output "$target/blockyard.profdata" "$profiles"/*.profraw

echo "pgo: 3 of 3, the optimized program"
build "-Cprofile-use=$(pwd)/$target/blockyard.profdata"
cp "$target/$host/dist/blockyard" "$target/blockyard"
echo "pgo: $target/blockyard"
