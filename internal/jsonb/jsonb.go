// Package jsonb knows which JSON Postgres's jsonb does not take.
package jsonb

import (
	"errors"
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Bounds of Postgres's numeric, in decimal digits.
const (
	maxDigits = 131072 // before the point
	maxScale  = 16383  // after it
)

// Check says why jsonb refuses text, which is valid JSON otherwise: encoding/json accepts it and
// Postgres does not. Valid JSON (json.Valid) is never nested deeper than jsonb allows.
func Check(text []byte) error {
	if !utf8.Valid(text) {
		return errors.New("is not valid UTF-8")
	}
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '"':
			end, err := checkString(text, i+1)
			if err != nil {
				return err
			}
			i = end
		case c == '-' || c >= '0' && c <= '9':
			end := i + 1
			for end < len(text) && isNumber(text[end]) {
				end++
			}
			if !fits(text[i:end]) {
				return fmt.Errorf("has the number %.20s, which Postgres's numeric cannot hold", text[i:end])
			}
			i = end
		default:
			i++
		}
	}
	return nil
}

// checkString returns where the string ends that has its text from i on.
func checkString(text []byte, i int) (end int, err error) {
	for i < len(text) && text[i] != '"' {
		switch {
		case text[i] != '\\':
			i++
		case i+1 < len(text) && text[i+1] != 'u':
			i += 2
		default:
			r := escaped(text, i)
			i += 6
			switch {
			case r == 0:
				return 0, errors.New(`contains \u0000, which jsonb cannot hold`)
			case !utf16.IsSurrogate(r):
			case utf16.DecodeRune(r, escaped(text, i)) == utf8.RuneError:
				return 0, errors.New("contains half of a surrogate pair")
			default:
				i += 6
			}
		}
	}
	return i + 1, nil
}

// escaped is the character of the \uXXXX at i, or -1.
func escaped(text []byte, i int) rune {
	if i+6 > len(text) || text[i] != '\\' || text[i+1] != 'u' {
		return -1
	}
	n, err := strconv.ParseUint(string(text[i+2:i+6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

func isNumber(c byte) bool {
	return c >= '0' && c <= '9' || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-'
}

// fits reports whether numeric can hold a number.
func fits(number []byte) bool {
	// digits are those before the point, from the first that is not 0 on: below 0 if
	// that is after it.
	digits, scale, exponent := 0, 0, 0
	point, significant := false, false
	for i, c := range number {
		switch {
		case c == '.':
			point = true
		case c == 'e' || c == 'E':
			var err error
			if exponent, err = strconv.Atoi(string(number[i+1:])); err != nil || exponent > 1<<29 || exponent < -1<<29 {
				return false
			}
			return inBounds(digits, scale, exponent, significant)
		case c >= '0' && c <= '9':
			significant = significant || c != '0'
			switch {
			case point:
				scale++
				if !significant {
					digits--
				}
			case significant:
				digits++
			}
		}
	}
	return inBounds(digits, scale, exponent, significant)
}

func inBounds(digits, scale, exponent int, significant bool) bool {
	return (!significant || digits+exponent <= maxDigits) && scale-exponent <= maxScale
}
