"""Run the command line: `python -m conformal_arbitrage`."""

from conformal_arbitrage.cli import main

if __name__ == "__main__":
    main(prog_name="arbitrage")
