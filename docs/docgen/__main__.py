"""`python -m docgen`: writes every generated part of the documentation."""

from docgen import reference, results


def main() -> None:
    for path, text in (reference.pages() | results.pages() | results.pictures()).items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path}")


if __name__ == "__main__":
    main()
