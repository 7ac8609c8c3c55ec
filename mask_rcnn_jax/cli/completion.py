"""Scripts that complete the commands in a shell, from lists alone: no Python runs at a key."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PROGRAM = "mask-rcnn-jax"
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Option:
    """A flag: whether it takes a value, the values that are known, and what it is for."""

    is_boolean: bool = False
    values: tuple[str, ...] = ()  # beside them, a file may be meant
    about: str = ""


@dataclass(frozen=True)
class Command:
    """A command: what it is for, its flags, and its arguments with the flags of each; an argument
    whose flags are None has those of the command."""

    about: str
    options: Mapping[str, Option]
    arguments: Mapping[str, Iterable[str] | None]
    takes_entries: bool  # of a config
    further: Mapping[str, Iterable[str]]  # what may follow an argument


def script(shell: str, commands: Mapping[str, Command], entries: Mapping[str, Option]) -> str:
    """Return the script for one of `SHELLS`.

    entries: those of a config, by dotted name.
    """
    if shell == "fish":
        return _fish(commands, entries)
    start = f"# Completion of {PROGRAM} for {shell}; made by `{PROGRAM} completion {shell}`.\n"
    if shell == "zsh":  # after compinit
        start += "autoload -U +X bashcompinit && bashcompinit\n"
    return start + _bash(commands, entries)


# Strings alone, so that zsh reads it, too. Readline completes what follows a colon, zsh the word.
_BASH = """_mask_rcnn_jax() {{
  local line=${{COMP_LINE:0:$COMP_POINT}} current before last command argument
  local flag value known word head
  local IFS=$' \\t\\n'
  current=${{line##*[[:space:]]}}
  before=${{line%"$current"}}
  read -r last command argument last <<< "$before"
  last=${{before%"${{before##*[![:space:]]}}"}}
  last=${{last##*[[:space:]]}}
  flag= known= value=$current
  case $current in
    --*=*) flag=${{current%%=*}} value=${{current#*=}} ;;
    *) case $last in --*=*) ;; --*) flag=$last ;; esac ;;
  esac
  case $flag in
    {booleans}) flag= ;;
  esac
  case "$command|$argument" in
    "|") known={commands} ;;
  esac
  case "$flag|$current" in
    "|--config."*|"|--noconfig."*)
      case $command in
        {with_entries}) known={entries} ;;
      esac ;;
    "|-"*)
      case "$command $argument" in
{flags}
      esac ;;
    "|"*)
      case "$command|$argument" in
{arguments}
      esac ;;
{values}
  esac
  head=${{value%"${{value##*:}}"}}
  if [[ -n $ZSH_VERSION ]]; then head= before=${{current%"$value"}}; else before=; fi
  COMPREPLY=()
  for word in $known; do
    case $word in "$value"*) COMPREPLY+=("$before${{word#"$head"}}") ;; esac
  done
}}
complete -o default -F _mask_rcnn_jax {program}
"""


def _bash(commands: Mapping[str, Command], entries: Mapping[str, Option]) -> str:
    flags, arguments, values = [], [], {}
    for name, command in commands.items():
        for argument, names in command.arguments.items():
            if names is not None:
                flags.append(f'"{name} {argument}") known={_flags(names)} ;;')
        flags.append(f'"{name} "*) known={_flags(command.options)} ;;')
        for argument, words in {"": command.arguments, **command.further}.items():
            arguments.append(f'"{name}|{argument}") known={_quoted(words)} ;;')
        for flag, option in command.options.items():
            values[flag] = tuple(dict.fromkeys((*values.get(flag, ()), *option.values)))
    values |= {name: option.values for name, option in entries.items()}
    booleans = {
        flag for c in commands.values() for flag, option in c.options.items() if option.is_boolean
    }
    indent = "\n        ".join
    return _BASH.format(
        program=PROGRAM,
        booleans="|".join(f"--{flag}|--no{flag}" for flag in sorted(booleans)),
        commands=_quoted(commands),
        with_entries="|".join(name for name, c in commands.items() if c.takes_entries),
        entries=_quoted(f"--{name}" for name in entries),
        flags="        " + indent(flags),
        arguments="        " + indent(arguments),
        values="\n".join(
            f'    "--{flag}|"*) known={_quoted(known)} ;;'
            for flag, known in values.items()
            if known
        ),
    )


def _flags(names: Iterable[str]) -> str:
    return _quoted(f"--{name}" for name in names)


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _fish(commands: Mapping[str, Command], entries: Mapping[str, Option]) -> str:
    start = f"complete -c {PROGRAM}"
    lines = [f"# Completion of {PROGRAM} for fish; made by `{PROGRAM} completion fish`."]
    for name, command in commands.items():
        about = shlex.quote(command.about)
        lines.append(f"{start} -n __fish_use_subcommand -f -a {name} -d {about}")
        seen = f"__fish_seen_subcommand_from {name}"
        if command.arguments:
            words = " ".join(command.arguments)
            first = shlex.quote(f"{seen}; and not __fish_seen_subcommand_from {words}")
            lines.append(f"{start} -n {first} -f -a {shlex.quote(words)}")
        for argument, following in command.further.items():
            where = shlex.quote(f"{seen}; and __fish_seen_subcommand_from {argument}")
            lines.append(f"{start} -n {where} -f -a {_quoted(following)}")
        for flag, option in command.options.items():
            owners = [a for a, names in command.arguments.items() if names and flag in names]
            where = (
                f"{seen}; and __fish_seen_subcommand_from {' '.join(owners)}" if owners else seen
            )
            lines.append(f"{start} -n {shlex.quote(where)} {_fish_option(flag, option)}")
    having = " ".join(name for name, command in commands.items() if command.takes_entries)
    where = shlex.quote(f"__fish_seen_subcommand_from {having}")
    lines += [f"{start} -n {where} {_fish_option(*entry)}" for entry in entries.items()]
    return "\n".join(lines) + "\n"


def _fish_option(flag: str, option: Option) -> str:
    text = f"-l {flag}" if option.is_boolean else f"-l {flag} -r"
    if option.values:
        text += f" -a {_quoted(option.values)}"
    return f"{text} -d {shlex.quote(option.about)}" if option.about else text
