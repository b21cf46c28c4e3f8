package arrival

import (
	"strconv"
	"strings"
	"time"
)

const azureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens"

// readAzure reads a trace of lengths alone.
func readAzure(header []byte, in *lines) ([]record, error) {
	if string(header) != azureHeader {
		return nil, in.errorf("%.60q: %s", header, formats)
	}
	var list []record
	for line := in.next(); line != nil; line = in.next() {
		fields := strings.Split(string(line), ",")
		if len(fields) != 3 {
			return nil, in.errorf("%d fields: want %s", len(fields), azureHeader)
		}
		at, err := parseTime(fields[0])
		if err != nil {
			return nil, in.errorf("timestamp %.40q: want one like 2023-11-16 18:15:46.6805900", fields[0])
		}
		context, err1 := strconv.Atoi(fields[1])
		generated, err2 := strconv.Atoi(fields[2])
		if err1 != nil || err2 != nil {
			return nil, in.errorf("%.20q and %.20q: want numbers of tokens", fields[1], fields[2])
		}
		context, generated, err = in.lengths(context, generated)
		if err != nil {
			return nil, err
		}
		list = append(list, record{at: at, input: context, output: generated})
	}
	if err := in.err(); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, in.errorf("no request below the header")
	}
	return list, nil
}

// parseTime gives the time since 1970.
func parseTime(text string) (time.Duration, error) {
	at, err := time.Parse("2006-01-02 15:04:05Z07:00", text)
	if err != nil {
		at, err = time.Parse("2006-01-02 15:04:05", text)
	}
	if err == nil && (at.Year() < 1970 || at.Year() > 2200) {
		err = strconv.ErrRange
	}
	return time.Duration(at.UnixNano()), err
}
