"""`python -m pagewire_client.cli` is `pagewire`."""

from pagewire_client.cli import main

if __name__ == "__main__":
    main()
