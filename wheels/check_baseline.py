"""Disassembles the x86 modules of wheels that must run on any processor of the platform.

`check_baseline.py WHEEL...` fails where a module that is loaded before the choice of an instruction
set, or the baseline's kernels, hold an instruction that x86-64 (on 32 bits: SSE2) does not have.
Needs `objdump` of binutils (`OBJDUMP` names another).
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
import zipfile

# VEX and EVEX instructions begin with v; the legacy ones that do, belong to virtual machines and to
# segment checks. Bit manipulation and the later SSE sets have no such mark.
LATER = re.compile(
    r"v(?!err\b|errw\b|erw\b|mcall|mlaunch|mresume|mxoff)[a-z0-9]+"
    r"|[tlx]zcnt|popcnt|crc32\w*|movbe|andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|s[ah][lr]x|adcx|adox"
    r"|(add|h(add|sub))subp[sd]|h(add|sub)p[sd]|mov(s[hl]|d)dup|lddqu|fisttp\w*"
    r"|pshufb|ph(add|sub)\w+|pmaddubsw|pmulhrsw|psign[bwd]|pabs[bwd]|palignr"
    r"|p?blend\w+|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmp(eqq|gtq|[ei]str[im])"
    r"|p(extr[bdq]|insr[bdq])|phminposuw|pm(ax|in)(s[bd]|u[wd])|pmov[sz]x\w+|pmul(dq|ld)|ptest"
    r"|round[ps][sd]|aes\w+|pclmul\w+|sha(1|256)\w+|k(mov|and|or|xor|unpck)\w+"
)
LINE = re.compile(
    r"\s+[0-9a-f]+:\t(?:(?:lock|rep\w*|bnd|notrack|data16|cs|ds|es|fs|gs)\s+)*([a-z][a-z0-9]*)(.*)"
)
BASELINE = re.compile(r"fastmha/(_cpu|_team|_kernels_baseline_f(32|64))\.[\w.-]*(so|pyd)$")


def later_instructions(path):
    """How often each instruction beyond the baseline occurs in a binary."""
    command = [os.environ.get("OBJDUMP", "objdump"), "-d", "--no-show-raw-insn", "-w", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = collections.Counter()
    instructions = 0
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            instructions += 1
            if LATER.fullmatch(match[1]) or re.search(r"%[yz]mm", match[2]):
                counts[match[1]] += 1
    if not instructions:
        sys.exit(f"check_baseline.py: no instructions in {path}")
    return instructions, counts


def main(wheels):
    if not wheels:
        sys.exit("check_baseline.py: no wheels")
    failed = False
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            names = [name for name in archive.namelist() if BASELINE.match(name)]
            if len(names) != 4:
                sys.exit(f"check_baseline.py: expected 4 modules in {wheel}, got {names}")
            for name in names:
                instructions, counts = later_instructions(archive.extract(name, folder))
                failed |= bool(counts)
                told = ", ".join(f"{word} ({n})" for word, n in counts.most_common()) or "none later"
                print(f"{name}: {instructions} instructions, {told}")
            # The search itself is tried on modules that must have what it looks for.
            for name in archive.namelist():
                if re.search(r"_kernels_avx\w+\.[\w.-]*(so|pyd)$", name):
                    _, counts = later_instructions(archive.extract(name, folder))
                    if not counts:
                        sys.exit(f"check_baseline.py: found no vector instructions in {name}")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
