package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// streamer sends streaming completions, with token ids, to engines.
type streamer struct {
	http *http.Client
}

func newStreamer() *streamer {
	return &streamer{&http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 256,
		DisableCompression:  true,
		WriteBufferSize:     32 << 10,
	}}}
}

// result is what the engine said about a request.
type result struct {
	prompt, cached, output int
	predicted              int // tokens, as a proxy says; 0: it does not
}

// complete sends a prompt and reads the answer to its end. first is called
// when the first token is there.
func (s *streamer) complete(ctx context.Context, address, model string, prompt []uint32, generate int, first func(time.Time)) (result, error) {
	b := make([]byte, 0, 6*len(prompt)+256)
	b = append(b, `{"model":`...)
	b = strconv.AppendQuote(b, model)
	b = append(b, `,"max_tokens":`...)
	b = strconv.AppendInt(b, int64(generate), 10)
	b = append(b, `,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"prompt":[`...)
	for i, t := range prompt {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t), 10)
	}
	b = append(b, "]}"...)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/completions", bytes.NewReader(b))
	if err != nil {
		return result{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Kvscout-Explain", "1")
	resp, err := s.http.Do(req)
	if err != nil {
		return result{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return result{}, fmt.Errorf("%s answers %s: %s", address, resp.Status, text)
	}
	// All chunks but the last hold text that nobody reads.
	var last []byte
	lines := bufio.NewReader(resp.Body)
	for seen := false; ; {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return result{}, fmt.Errorf("%s: answer breaks off: %w", address, err)
		}
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		if !ok {
			continue
		}
		if !seen {
			seen = true
			first(time.Now())
		}
		if bytes.HasPrefix(data, []byte("[DONE]")) {
			break
		}
		last = append(last[:0], data...)
	}
	// The body must be read to its end for the connection to be used again.
	if _, err := io.Copy(io.Discard, lines); err != nil {
		return result{}, err
	}
	var in struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Output  int `json:"completion_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(last, &in); err != nil {
		return result{}, fmt.Errorf("%s: usage: %w", address, err)
	}
	predicted, _ := strconv.Atoi(resp.Header.Get("X-Kvscout-Cached-Tokens"))
	return result{in.Usage.Prompt, in.Usage.Details.Cached, in.Usage.Output, predicted}, nil
}
