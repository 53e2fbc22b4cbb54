"""`python -m pagewire_cli` is `pagewire`."""

from pagewire_cli import main

if __name__ == "__main__":
    main()
